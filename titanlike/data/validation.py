"""What of a recipe's data and tokenizer cannot work, said before anything starts."""

import glob
import os
from pathlib import Path

from titanlike.config import PretrainRecipe, UserError


def data_problems(recipe: PretrainRecipe) -> list[str]:
    """What is wrong with the keys, whatever machine they are for."""
    data, problems = recipe.data, []
    if recipe.tokenizer.encoding == "bytes" and recipe.model.vocab_size < 257:
        problems.append(
            f"model.vocab_size = {recipe.model.vocab_size} is smaller than the tokenizer's 257 tokens; use 257 or more"
        )
    if data.holdout_every == 1:
        problems.append("data.holdout_every = 1 holds everything out; use 2 or more, or 0 for nothing")
    if recipe.validation.interval and not data.validation_path:
        if data.source == "stream":
            problems.append(
                "validation.interval is set, but nothing is held out of a stream; set data.validation_path to shards or text, "
                "or validation.interval = 0"
            )
        elif data.source != "shards" and not data.holdout_every:  # shards may have a split of their own
            problems.append(
                "validation.interval is set, but data.holdout_every = 0 holds nothing out; "
                "set validation.interval = 0, or data.holdout_every = 50"
            )
    if data.mixture and data.source in ("python_stdlib", "synthetic"):
        problems.append(
            f"data.mixture is set, but data.source = '{data.source}' reads no paths; set data.source = 'shards'"
        )
    if data.mixture and data.path:
        problems.append("data.path and data.mixture are both set; leave one of them out")
    if data.weights and len(data.weights) != len(data.mixture):
        problems.append(
            f"data.weights has {len(data.weights)} numbers for the {len(data.mixture)} paths of data.mixture; give one each"
        )
    if data.source == "shards" and data.prompt_field:
        problems.append(
            "data.prompt_field is for text; shards have their prompts from `titanlike data prepare --prompt-field`"
        )
    return problems


def missing_data(recipe: PretrainRecipe) -> list[str]:
    """What should be on this machine and is not, or is not what it should be."""
    data = recipe.data
    read = data.source in ("text", "shards", "stream")
    places = dict.fromkeys(data.mixture or (data.path,), "mixture" if data.mixture else "path") if read else {}
    if data.validation_path:
        places[data.validation_path] = "validation_path"
    problems = []
    for place, key in places.items():
        if "://" in place or Path(place).exists() or glob.glob(place, recursive=True):
            continue
        wanted = (
            "a folder that `titanlike data prepare` has made"
            if data.source == "shards"
            else "a text file, a folder or a pattern"
        )
        problems.append(
            f"data.{key} = {place!r} does not exist here; give {wanted}, or set data.source = 'synthetic' to run without data"
        )
    problems += _missing_tokenizer(recipe.tokenizer.encoding)
    if data.source == "shards" and not problems:
        from titanlike.data.sources import check_shards  # only here: it takes a moment

        for place in places:
            try:
                check_shards(place, recipe)
            except UserError as problem:
                problems.append(str(problem))
    return problems


def _missing_tokenizer(encoding: str) -> list[str]:
    if encoding == "bytes" or Path(encoding).is_file() or Path(encoding, "tokenizer.json").is_file():
        return []
    if os.sep in encoding:
        return [
            f"tokenizer.encoding = {encoding!r}: there is no such file; put the tokenizer's rank file or tokenizer.json there, "
            "or give the name of a tiktoken encoding such as 'gpt2', or 'bytes'"
        ]
    from titanlike.data.text.tokenizer import check_name  # only here: most recipes do without what it imports

    try:
        check_name(encoding)
    except UserError as problem:
        return [str(problem)]
    return []
