"""The tokenizer files of a Hugging Face folder, for tokenizers of any kind. Does not import torch."""

import json
import re
from collections.abc import Mapping
from typing import Any

from titanlike.data.tokens.tokenizer import Tokenizer, files_of

# Files beside a tokenizer.json that belong to the tokenizer.
COMPANIONS = ("special_tokens_map.json", "chat_template.jinja")
Added = tuple[int | None, int | None]  # before a text and after it
FLAGS = ("add_bos_token", "add_eos_token")  # in a tokenizer_config.json


def tokenizer_files(tokenizer: Tokenizer, max_length: int, *, closes: bool = False) -> dict[str, bytes]:
    """Returns the names and contents of files from which `AutoTokenizer` builds the same tokenizer, which begins a text with BOS if
    documents begin with it, and, if `closes`, as for an encoder, ends it with EOS."""
    added: Added = tokenizer.bos, tokenizer.eos if closes else None
    names = tokenizer.special_names
    config = dict(tokenizer.codec.config)
    files = {}
    source = files_of(tokenizer.section.encoding)
    if source and source[0].suffix == ".json":
        files["tokenizer.json"] = source[0].read_bytes()
        content = json.loads(files["tokenizer.json"])
        known = {token.get("content") for token in content.get("added_tokens") or []}
        content["added_tokens"] = (content.get("added_tokens") or []) + [
            token for token in _special_tokens(tokenizer) if token["content"] not in known
        ]
        wanted = tuple(token is not None for token in added)
        if adds_bos_and_eos(content, config) != wanted:
            steps = [step for step in _steps_of(content) if "SpecialToken" not in _template_of(step)]
            steps += [_template(tokenizer, added)] if any(wanted) else []
            content["post_processor"] = {"type": "Sequence", "processors": steps} if steps else None
            # Some classes of transformers replace the post-processor by these.
            config |= dict(zip(FLAGS, wanted, strict=True))
        if content != json.loads(files["tokenizer.json"]):
            files["tokenizer.json"] = json.dumps(content, ensure_ascii=False).encode()
        companions = [source[0].with_name(name) for name in COMPANIONS]
        files |= {file.name: file.read_bytes() for file in companions if file.is_file()}
    else:
        files["tokenizer.json"] = json.dumps(_byte_pair_tokenizer(tokenizer, added), ensure_ascii=False).encode()
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


def _special_tokens(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Returns the special tokens in the form of a `tokenizer.json`."""
    return [
        {"id": number, "content": name, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for number, name in sorted(tokenizer.special_names.items())
    ]


def _byte_pair_tokenizer(tokenizer: Tokenizer, added: Added) -> dict[str, Any]:
    """Returns a tiktoken encoding as the content of a `tokenizer.json`."""
    codec: Any = tokenizer.codec
    tokens = sorted(codec.tokens.items(), key=lambda item: item[1])
    vocab = {token: rank for token, rank in tokens if token not in codec.special}
    halves = ((token[:size], token[size:]) for token in vocab for size in range(1, len(token)))
    merges = [[left, right] for left, right in halves if left in vocab and right in vocab]
    # A "+" after a count is possessive in tiktoken, which makes no difference here, and another repetition in tokenizers.
    pattern = re.sub(r"(\{\d+(?:,\d*)?\})\+", r"\1", codec.encoding._pat_str)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _special_tokens(tokenizer),
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level if added == (None, None) else _template(tokenizer, added),
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
            "vocab": vocab,
            "merges": merges,
        },
    }


def adds_bos_and_eos(content: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether a `tokenizer.json`, with the `tokenizer_config.json` beside it, begins and ends every text with a special token."""
    templates = [_template_of(step) for step in _steps_of(content)]
    first, last = (["SpecialToken"] in [template[at:][:1] for template in templates] for at in (0, -1))
    given = [config.get(flag) for flag in FLAGS]
    return first if given[0] is None else bool(given[0]), last if given[1] is None else bool(given[1])


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


def _template(tokenizer: Tokenizer, added: Added) -> dict[str, Any]:
    """Returns the post-processor that adds a special token before and after a text."""
    names = tokenizer.special_names
    begin, end = ([] if token is None else [{"SpecialToken": {"id": names[token], "type_id": 0}}] for token in added)
    first, second = ([{"Sequence": {"id": text, "type_id": 0}}, *end] for text in "AB")
    named = {names[token]: token for token in added if token is not None}
    return {
        "type": "TemplateProcessing",
        "single": [*begin, *first],
        "pair": [*begin, *first, *second],
        "special_tokens": {name: {"id": name, "ids": [token], "tokens": [name]} for name, token in named.items()},
    }
