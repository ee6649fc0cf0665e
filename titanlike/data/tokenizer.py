"""Text to tokens and back, through tiktoken."""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tiktoken

from titanlike.config import UserError
from titanlike.config.load import nearest

# How Llama 3 and OpenAI's cl100k cut text into words before the merges.
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class Tokenizer:
    """A tiktoken encoding that ends each document with one token of its own."""

    def __init__(self, encoding: tiktoken.Encoding, end_of_text: int) -> None:
        self.encoding = encoding
        self.end_of_text = end_of_text
        self.vocab_size = encoding.n_vocab

    @property
    def fingerprint(self) -> str:
        """Equal for tokenizers that cut and number text alike."""
        found = hashlib.sha256(repr((self.encoding._pat_str, self.end_of_text)).encode())
        for table in (self.encoding._mergeable_ranks, self.encoding._special_tokens):
            for token, number in sorted(table.items(), key=lambda item: item[1]):
                found.update(f"{token!r} {number} ".encode())
        return found.hexdigest()[:16]

    def encode(self, text: str) -> npt.NDArray[np.uint32]:
        """Tokens of a text. Special tokens spelt out in the text are only text."""
        return self.encoding.encode_to_numpy(text, disallowed_special=())

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens; bytes that are not UTF-8 show as a replacement sign."""
        return self.encoding.decode([token for token in tokens if token != self.end_of_text])


def build_tokenizer(encoding: str, model_vocab_size: int) -> Tokenizer:
    """`bytes`, the name of a tiktoken encoding, or the path of a rank file (`tokenizer.model`)."""
    tokenizer = _find(encoding)
    if tokenizer.vocab_size > model_vocab_size:
        raise UserError(
            f"model.vocab_size = {model_vocab_size} is smaller than the {tokenizer.vocab_size} tokens of "
            f"tokenizer.encoding = {encoding!r}; set model.vocab_size = {-(-tokenizer.vocab_size // 64) * 64}"
        )
    return tokenizer


def check_name(encoding: str) -> None:
    """Refuse what is not the name of a tiktoken encoding."""
    names = tiktoken.list_encoding_names()
    if encoding not in names:
        near = nearest(encoding, ["bytes", *names])
        raise UserError(
            f"tokenizer.encoding = {encoding!r} is neither a file nor a tiktoken encoding; "
            + (f"did you mean {near!r}?" if near else f"use 'bytes', a path, or one of {', '.join(names)}")
        )


def _find(encoding: str) -> Tokenizer:
    if encoding == "bytes":
        ranks = {bytes([value]): value for value in range(256)}
        # Cut anywhere: a byte is a token whatever stands beside it, and long pieces are fast.
        return _with_end("bytes", r"[\s\S]{1,64}", ranks, ["<|endoftext|>"])
    if Path(encoding).is_file():
        # Llama 3's first special token begins a text, the second ends it.
        return _with_end(encoding, WORDS, _read_ranks(Path(encoding)), ["<|begin_of_text|>", "<|end_of_text|>"])
    check_name(encoding)
    try:
        found = tiktoken.get_encoding(encoding)
    except OSError as error:  # requests' errors are OSErrors
        raise UserError(
            f"tokenizer.encoding = {encoding!r}: tiktoken has to download it once and could not ({type(error).__name__}); "
            "connect this machine, or fetch it elsewhere and set TIKTOKEN_CACHE_DIR to the folder"
        ) from None
    return Tokenizer(found, found.eot_token)


def _with_end(name: str, pattern: str, ranks: dict[bytes, int], special: list[str]) -> Tokenizer:
    tokens = {token: len(ranks) + index for index, token in enumerate(special)}
    encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=tokens)
    return Tokenizer(encoding, tokens[special[-1]])


def _read_ranks(path: Path) -> dict[bytes, int]:
    ranks = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise UserError(
                f"{path}, line {number}: not a rank file: expected a token in base64 and its rank"
            ) from None
    lacking = [value for value in range(256) if bytes([value]) not in ranks]
    if lacking or sorted(ranks.values()) != list(range(len(ranks))):
        raise UserError(
            f"{path}: not a whole rank file: "
            + (f"the byte {lacking[0]} has no rank" if lacking else "its ranks do not count from 0 without a gap")
        )
    return ranks
