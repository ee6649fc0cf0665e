"""Checks of a recipe's data and tokenizer sections that need no torch."""

import glob
import os
from pathlib import Path

from titanlike.config import PretrainRecipe, UserError

READS_PATHS = ("text", "shards", "stream", "chat")


def data_problems(recipe: PretrainRecipe) -> list[str]:
    """Returns the contradictions between keys, which are errors on any machine."""
    data = recipe.data
    reads_paths = data.source in READS_PATHS
    holds_out = recipe.validation.interval > 0 and not data.validation_path
    checks = [
        (
            recipe.tokenizer.encoding == "bytes" and recipe.model.vocab_size < 257,
            f"model.vocab_size = {recipe.model.vocab_size} is smaller than the tokenizer's 257 tokens; use 257 or more",
        ),
        (
            data.holdout_every == 1,
            "data.holdout_every = 1 holds out every sequence; use 2 or more, or 0 to hold out none",
        ),
        (
            holds_out and data.source == "stream",
            "validation.interval is set, but nothing is held out of a stream; set data.validation_path to shards or text, "
            "or validation.interval = 0",
        ),
        (
            holds_out and data.source not in ("stream", "shards") and not data.holdout_every,  # shards may have a split
            "validation.interval is set, but data.holdout_every = 0 holds out nothing; set validation.interval = 0, or "
            "data.holdout_every = 50",
        ),
        (
            data.mixture and data.source not in READS_PATHS,
            f"data.mixture is set, but data.source = '{data.source}' reads no paths; set data.source = 'shards'",
        ),
        (
            reads_paths and not data.path and not data.mixture,
            f"data.source = '{data.source}' requires data.path, which is empty; set it, or data.mixture",
        ),
        ("" in data.mixture, "data.mixture contains an empty path; remove it"),
        (data.path and data.mixture, "data.path and data.mixture are both set; remove one of them"),
        (
            data.weights and len(data.weights) != len(data.mixture),
            f"data.weights has {len(data.weights)} numbers for the {len(data.mixture)} paths of data.mixture; give one each",
        ),
        (
            data.chat_template and "chat" not in data.source,
            f"data.chat_template renders conversations, but data.source = '{data.source}'; set data.source = 'chat'",
        ),
        (
            data.source == "shards" and data.prompt_field,
            "data.prompt_field applies to text; for shards, use `titanlike data prepare --prompt-field`",
        ),
    ]
    return [problem for is_wrong, problem in checks if is_wrong]


def missing_data(recipe: PretrainRecipe) -> list[str]:
    """Returns the data and tokenizer files that are missing on this machine or unusable."""
    data = recipe.data
    reads_paths = data.source in READS_PATHS and (data.path or data.mixture)
    keys = dict.fromkeys(data.mixture or (data.path,), "mixture" if data.mixture else "path") if reads_paths else {}
    if data.validation_path:
        keys[data.validation_path] = "validation_path"
    shards = data.source == "shards"
    expected = "a folder made by `titanlike data prepare`" if shards else "a text file, a folder or a pattern"
    problems = [
        f"data.{key} = {path!r} does not exist; give {expected}, or set data.source = 'synthetic' to run without data"
        for path, key in keys.items()
        if "://" not in path and not Path(path).exists() and not glob.glob(path, recursive=True)
    ]
    if data.chat_template and not Path(data.chat_template).is_file():
        problems.append(f"data.chat_template = {data.chat_template!r} is not a file; give a Jinja template")
    problems += _missing_tokenizer(recipe.tokenizer.encoding)
    if shards and not problems:
        from titanlike.data.sources import check_shards  # slow to import, and most recipes do not need it

        for path in keys:
            try:
                check_shards(path, recipe)
            except UserError as problem:
                problems.append(str(problem))
    return problems


def _missing_tokenizer(encoding: str) -> list[str]:
    if encoding == "bytes" or Path(encoding).is_file() or Path(encoding, "tokenizer.json").is_file():
        return []
    if os.sep in encoding:
        return [
            f"tokenizer.encoding = {encoding!r}: no such file; give a tiktoken rank file or tokenizer.json, the name of a "
            "tiktoken encoding such as 'gpt2', or 'bytes'"
        ]
    from titanlike.data.text.tokenizer import check_name  # slow to import, and most recipes do not need it

    try:
        check_name(encoding)
    except UserError as problem:
        return [str(problem)]
    return []
