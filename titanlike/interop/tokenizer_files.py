"""The tokenizer files of a Hugging Face folder, for tokenizers of any kind. Does not import torch."""

import itertools
import json
import re
from collections.abc import Mapping
from typing import Any

from titanlike.data.tokens.tokenizer import Tokenizer, byte_letters, files_of
from titanlike.utils.files import read_regular

# Files beside a tokenizer.json that belong to the tokenizer.
COMPANIONS = ("special_tokens_map.json", "chat_template.jinja")


def tokenizer_files(tokenizer: Tokenizer, max_length: int) -> dict[str, bytes]:
    """Returns the names and contents of files from which `AutoTokenizer` builds the same tokenizer."""
    names = {number: name for name, number in tokenizer.codec.special.items()}
    config: dict[str, Any] = {}
    files = {}
    source = files_of(tokenizer.section.encoding)
    if source and source[0].suffix == ".json":
        files["tokenizer.json"] = read_regular(source[0])
        if len(source) > 1:
            config = json.loads(read_regular(source[1]))
        content, wants_bos = json.loads(files["tokenizer.json"]), tokenizer.bos is not None
        if adds_bos(content, config) != wants_bos:
            content["post_processor"] = _with_bos(content, tokenizer) if wants_bos else _without_bos(content)
            config["add_bos_token"] = wants_bos  # which replaces the post-processor in some classes of transformers
            files["tokenizer.json"] = json.dumps(content, ensure_ascii=False).encode()
        companions = [source[0].with_name(name) for name in COMPANIONS]
        files |= {file.name: read_regular(file) for file in companions if file.is_file()}
    else:
        files["tokenizer.json"] = json.dumps(_byte_pair_tokenizer(tokenizer), ensure_ascii=False).encode()
    if config.get("tokenizer_class", "TokenizersBackend") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that transformers 4 knows, and 5 still accepts
    for key, number in (("bos_token", tokenizer.bos), ("eos_token", tokenizer.eos)):
        value = config.get(key)
        if number is not None and names[number] != (value.get("content") if isinstance(value, dict) else value):
            config[key] = names[number]
    if config.get("eos_token") is None:  # without EOS, a document ends where the next one begins
        config["eos_token"] = names[tokenizer.separator.token]
    config |= {"model_max_length": max_length, "clean_up_tokenization_spaces": False}
    files["tokenizer_config.json"] = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    return files


def _byte_pair_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns a tiktoken encoding as the content of a `tokenizer.json`."""
    encoding: Any = tokenizer.codec
    ranks: Mapping[bytes, int] = encoding.encoding._mergeable_ranks
    letters = byte_letters()
    spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        parts = _parts(token, ranks)
        if len(parts) == 2:
            merges.append([spelled[part] for part in parts])
    special = [
        {"id": number, "content": name, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for name, number in sorted(encoding.special.items(), key=lambda item: item[1])
    ]
    # A "+" after a count is possessive in tiktoken, which makes no difference here, and another repetition in tokenizers.
    pattern = re.sub(r"(\{\d+(?:,\d*)?\})\+", r"\1", encoding.encoding._pat_str)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": _begin_with(tokenizer) or byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,  # as tiktoken, which takes a piece that is a token as it is
            "vocab": {spelled[token]: rank for token, rank in ranks.items()},
            "merges": merges,
        },
    }


def adds_bos(content: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Whether a `tokenizer.json`, with the `tokenizer_config.json` beside it, begins every text with a special token."""
    if isinstance(config.get("add_bos_token"), bool):
        return bool(config["add_bos_token"])
    return any(_template_of(step)[:1] == ["SpecialToken"] for step in _steps_of(content))


def _steps_of(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the steps of the post-processor in a `tokenizer.json`."""
    processor = content.get("post_processor")
    steps = processor.get("processors", [processor]) if isinstance(processor, dict) else []
    return [step for step in steps if isinstance(step, dict)]


def _template_of(step: Mapping[str, Any]) -> list[str]:
    """Returns the kinds of what a step makes of a text: `Sequence` is the text itself."""
    if step.get("type") in ("BertProcessing", "RobertaProcessing"):
        return ["SpecialToken", "Sequence", "SpecialToken"]
    single = step.get("single")
    return [kind for piece in single for kind in piece] if isinstance(single, list) else []


def _with_bos(content: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the post-processor with BOS before a text."""
    return {"type": "Sequence", "processors": [*_steps_of(content), _begin_with(tokenizer)]}


def _without_bos(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the post-processor without the steps that add special tokens."""
    steps = [step for step in _steps_of(content) if "SpecialToken" not in _template_of(step)]
    return {"type": "Sequence", "processors": steps} if steps else None


def _begin_with(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Returns the post-processor that adds BOS to a text if the model was trained with it."""
    if tokenizer.bos is None:
        return None
    [name] = [name for name, number in tokenizer.codec.special.items() if number == tokenizer.bos]
    first: dict[str, Any] = {"SpecialToken": {"id": name, "type_id": 0}}
    text: dict[str, Any] = {"Sequence": {"id": "A", "type_id": 0}}
    pair: dict[str, Any] = {"Sequence": {"id": "B", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, pair],
        "special_tokens": {name: {"id": name, "ids": [tokenizer.bos], "tokens": [name]}},
    }


def _parts(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """Returns the tokens of which byte-pair encoding makes `token` in its last merge."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(first + second, len(ranks)) for first, second in itertools.pairwise(parts)]
        best = min(range(len(pairs)), key=pairs.__getitem__)
        if pairs[best] >= ranks[token]:
            break
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts
