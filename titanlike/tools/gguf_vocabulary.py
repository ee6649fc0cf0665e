"""The vocabulary of a GGUF file, from a `tokenizer.json`. Does not import torch."""

import json
import re
from typing import Any

from titanlike.config import UserError
from titanlike.config.base import shown
from titanlike.data.tokens.tokenizer import SPLIT_PATTERN

# Types of tokens in GGUF.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
_CASED = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CASED[0]}*{_CASED[1]}+{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{_CASED[0]}+{_CASED[1]}*{_SUFFIX}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
# llama.cpp knows patterns by names of tokenizers that have them: here without merges of a piece that is a token, and with them.
PRE_TOKENIZERS: dict[tuple[str, ...], tuple[str, str]] = {
    (SPLIT_PATTERN,): ("llama-bpe", "smaug-bpe"),
    (SPLIT_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}"),): ("qwen2", "qwen2"),
    (GPT2,): ("gpt-2", "gpt-2"),
    (O200K,): ("gpt-4o", "gpt-4o"),
    DEEPSEEK_V3: ("deepseek-v3", "deepseek-v3"),
}
SPACE = "\u2581"  # of SentencePiece
NO_MERGE = "<> <>"  # llama.cpp requires a merge. This one is of tokens that no other merge makes


def vocabulary(content: dict[str, Any], size: int, source: str) -> dict[str, Any]:
    """Returns the keys of GGUF, without their prefix, that describe a tokenizer.

    Args:
        content: of its `tokenizer.json`.
        size: number of rows of the model's embedding.
        source: what an error calls the tokenizer.
    """
    model, added = content["model"], content.get("added_tokens") or []
    if model["type"] != "BPE":
        raise UserError(f"{source}: model.type = {shown(model['type'])!r} is not exported to GGUF, only 'BPE' is")
    tokens, types = [f"[PAD{index}]" for index in range(size)], [UNUSED] * size

    numbered = [*model["vocab"].items(), *((one["content"], one["id"]) for one in added)]
    kinds = {one["content"]: CONTROL if one["special"] else USER_DEFINED for one in added}
    kinds[model.get("unk_token")] = UNKNOWN
    for token, number in numbered:
        if number < size:  # an added token may have no row in the model
            kind = kinds.get(token, NORMAL)
            if model.get("byte_fallback") and re.fullmatch("<0x[0-9A-F]{2}>", token):
                kind = BYTE
            # llama.cpp would write these characters, and not spaces, for a user-defined token of them.
            elif kind == USER_DEFINED and SPACE in token:
                kind = NORMAL
            tokens[number], types[number] = token, kind
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    found: dict[str, Any] = {"tokens": tokens, "token_type": types}
    if model.get("byte_fallback"):
        return found | _sentence_piece(content, tokens, merges, source)
    name = _pre_tokenizer(content, source) if merges else "gpt-2"
    return found | {"model": "gpt2", "pre": name, "merges": [" ".join(merge) for merge in merges] or [NO_MERGE]}


def _pre_tokenizer(content: dict[str, Any], source: str) -> str:
    """Returns llama.cpp's name of what splits a text before byte-level merges."""
    normalizers = [step["type"] for step in _steps(content["normalizer"], "normalizers")]
    if set(normalizers) - {"NFC"}:
        raise UserError(
            f"{source}: llama.cpp has no tokenizer with the normalizer {shown(', '.join(normalizers))}; use --format hf"
        )
    steps = _steps(content["pre_tokenizer"], "pretokenizers")
    *splits, last = [step["type"] for step in steps] or [""]
    patterns = tuple(step["pattern"].get("Regex", "") for step in steps if step["type"] == "Split")
    if not splits and last == "ByteLevel" and steps[0].get("use_regex", True):
        patterns = (GPT2,)
    if patterns not in PRE_TOKENIZERS or last != "ByteLevel" or set(splits) - {"Split"}:
        what = json.dumps(patterns or [*splits, last], ensure_ascii=False)
        raise UserError(
            f"{source}: llama.cpp has no pre-tokenizer that splits text by {shown(what)}; train a tokenizer with `titanlike data "
            "train-tokenizer`, or use --format hf"
        )
    return PRE_TOKENIZERS[patterns][0 if content["model"].get("ignore_merges") else 1]


def _sentence_piece(
    content: dict[str, Any], tokens: list[str], merges: list[tuple[str, ...]], source: str
) -> dict[str, Any]:
    """Returns the keys of a tokenizer that llama.cpp runs as SentencePiece does: it merges the neighbors whose token has the
    highest score. In a `tokenizer.json`, the merges of a token with a higher score come first."""
    normalizers = _steps(content["normalizer"], "normalizers")
    steps = _steps(content["pre_tokenizer"], "pretokenizers")
    kinds = [step["type"] for step in (*normalizers, *steps)]
    # Gemma's splits where there are spaces, of which the normalizer leaves none.
    if kinds not in (["Replace", "Split"], ["Prepend", "Replace"], ["Replace"], ["Metaspace"]):
        raise UserError(
            f"{source}: llama.cpp has no tokenizer with byte_fallback and the steps {shown(', '.join(kinds))}; use --format hf"
        )
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault("".join(merge), rank)
    prefix = kinds == ["Prepend", "Replace"] or (
        kinds == ["Metaspace"] and steps[0].get("prepend_scheme", "always") != "never"
    )
    scores = [-float(ranks.get(token, len(merges))) for token in tokens]
    return {"model": "llama", "scores": scores, "add_space_prefix": prefix}


def _steps(value: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """Returns the steps of a normalizer or pre-tokenizer."""
    return [] if value is None else value[key] if value["type"] == "Sequence" else [value]
