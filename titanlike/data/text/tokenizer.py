"""Text to tokens and back, through tiktoken or Hugging Face's tokenizers. No torch."""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import tiktoken

from titanlike.config import UserError
from titanlike.config.load import nearest
from titanlike.config.sections import Tokenizer as Section

# How Llama 3 and OpenAI's cl100k cut text into words before the merges.
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# What tokenizers call the tokens that open and close a text, where nothing beside them says so.
USUAL = {
    "eos": ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>", "<|endofprompt|>"),
    "bos": ("<|begin_of_text|>", "<s>", "<bos>", "<|bos|>", "<|startoftext|>"),
}

IDs = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Separator:
    """The token at which documents meet: the last of one if it closes it, else the first."""

    token: int
    closes: bool


class Codec(Protocol):
    """What turns text into numbers, of whatever library."""

    vocab_size: int

    @property
    def special(self) -> Mapping[str, int]:
        """Tokens that no text is made into, by name."""

    @property
    def identity(self) -> bytes:
        """Equal for two that do the same."""

    def encode(self, text: str) -> IDs:
        """Numbers of a text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of numbers."""


class Tokenizer:
    """A codec, and what opens and closes a document."""

    def __init__(self, codec: Codec, section: Section) -> None:
        self.codec = codec
        self.vocab_size = codec.vocab_size
        self.section = section
        self.eos = self._special("eos") if section.special != "bos" else None
        self.bos = self._special("bos") if section.special != "eos" else None
        if self.bos == self.eos:
            raise UserError(
                f"tokenizer.special = 'both' wants two tokens, but tokenizer.encoding = {section.encoding!r} has one for both; "
                "use 'eos'"
            )

    @property
    def separator(self) -> Separator:
        """What tells one document from the next."""
        found = self.bos if self.eos is None else self.eos
        assert found is not None
        return Separator(found, closes=self.eos is not None)

    @property
    def dtype(self) -> type[np.uint16] | type[np.uint32]:
        """The smallest whole number that holds each token."""
        return np.uint16 if self.vocab_size <= 2**16 else np.uint32

    @property
    def fingerprint(self) -> str:
        """Equal for tokenizers that cut, number and mark text alike."""
        return hashlib.sha256(self.codec.identity + repr((self.bos, self.eos)).encode()).hexdigest()[:16]

    def encode(self, text: str) -> IDs:
        """Tokens of a text. Special tokens spelt out in the text are only text."""
        return self.codec.encode(text)

    def opening(self, text: str) -> list[int]:
        """Tokens of a document that begins with this text and goes on; at least one."""
        begin = [] if self.bos is None else [self.bos]
        return begin + self.encode(text).tolist() or [self.separator.token]

    def document(self, text: str, prompt: str = "", *, first: bool = True, last: bool = True) -> tuple[IDs, int]:
        """Tokens of a document between those that open and close it, and how many of them are given and not learnt: those of
        a prompt before the text. Or of its first piece, its last one, or one between them."""
        opening = [] if self.bos is None or not first else [np.array([self.bos], np.uint32)]
        given = [*opening, self.encode(prompt)] if prompt else []
        closing = [] if self.eos is None or not last else [np.array([self.eos], np.uint32)]
        parts = [*(given or opening), self.encode(text), *closing]
        return np.concatenate(parts), sum(map(len, given))

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, without those that open and close; bytes that are not UTF-8 show as a replacement sign."""
        return self.codec.decode([token for token in tokens if token not in (self.bos, self.eos)])

    def _special(self, role: str) -> int:
        """The number of the token in a role: the one that the recipe names, else the tokenizer's own."""
        special, named = self.codec.special, getattr(self.section, role)
        if named and named not in special:
            near = nearest(named, list(special))
            raise UserError(
                f"tokenizer.{role} = {named!r} is no special token of tokenizer.encoding = {self.section.encoding!r}; "
                + (f"did you mean {near!r}?" if near else f"it has {', '.join(special) or 'none'}")
            )
        own = getattr(self.codec, role, "")
        for name in [named] if named else [own, *USUAL[role]]:
            if name in special:
                return special[name]
        verb = "closes" if role == "eos" else "opens"
        raise UserError(
            f"tokenizer.encoding = {self.section.encoding!r} does not say which token {verb} a document; set tokenizer.{role} "
            f"to one of its special tokens: {', '.join(special) or 'it has none'}"
        )


class _TikToken:
    """A tiktoken encoding."""

    def __init__(self, encoding: tiktoken.Encoding) -> None:
        self.encoding = encoding
        self.special = encoding._special_tokens
        self.vocab_size = encoding.n_vocab
        self.eos, self.bos = "<|endoftext|>", ""

    @property
    def identity(self) -> bytes:
        found = hashlib.sha256(self.encoding._pat_str.encode())
        for table in (self.encoding._mergeable_ranks, self.encoding._special_tokens):
            for token, number in sorted(table.items(), key=lambda item: item[1]):
                found.update(f"{token!r} {number} ".encode())
        return found.digest()

    def encode(self, text: str) -> IDs:
        return self.encoding.encode_to_numpy(text, disallowed_special=())

    def decode(self, tokens: Sequence[int]) -> str:
        return self.encoding.decode(tokens)


class _HuggingFace:
    """A `tokenizer.json`, and what `tokenizer_config.json` beside it says of the ends of a text."""

    def __init__(self, path: Path) -> None:
        tokenizers = _import_tokenizers(path)
        try:
            self.tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001  the library raises no narrower one
            raise UserError(f"{path}: not a tokenizer.json that the tokenizers library can read: {error}") from None
        self.tokenizer.encode_special_tokens = True  # spelt out in a text, they are only text
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        added = self.tokenizer.get_added_tokens_decoder()
        self.special = {token.content: number for number, token in added.items() if token.special}
        self.vocab_size = 1 + max(self.tokenizer.get_vocab(with_added_tokens=True).values())
        beside = path.with_name("tokenizer_config.json")
        says = json.loads(beside.read_text()) if beside.is_file() else {}
        self.eos, self.bos = (_content(says.get(f"{role}_token")) for role in ("eos", "bos"))
        self.identity = self.tokenizer.to_str().encode()

    def encode(self, text: str) -> IDs:
        # In a batch of one: of these the library finds no places in the text, which nobody asks for.
        [found] = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.array(found.ids, np.uint32)

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens), skip_special_tokens=False)


def build_tokenizer(section: Section, model_vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer of a recipe. Refused if it has more tokens than the model."""
    tokenizer = Tokenizer(_find(section.encoding), section)
    if model_vocab_size is not None and tokenizer.vocab_size > model_vocab_size:
        raise UserError(
            f"model.vocab_size = {model_vocab_size} is smaller than the {tokenizer.vocab_size} tokens of "
            f"tokenizer.encoding = {section.encoding!r}; set model.vocab_size = {-(-tokenizer.vocab_size // 64) * 64}"
        )
    return tokenizer


def files_of(encoding: str) -> list[Path]:
    """The files that make a tokenizer, if it is made of files."""
    path = Path(encoding)
    if (path / "tokenizer.json").is_file():
        path = path / "tokenizer.json"
    if encoding == "bytes" or not path.is_file():
        return []
    beside = path.with_name("tokenizer_config.json")
    return [path, beside] if path.suffix == ".json" and beside.is_file() else [path]


def check_name(encoding: str) -> None:
    """Refuse what is not the name of a tiktoken encoding."""
    names = tiktoken.list_encoding_names()
    if encoding not in names:
        near = nearest(encoding, ["bytes", *names])
        raise UserError(
            f"tokenizer.encoding = {encoding!r} is neither a file nor a tiktoken encoding; "
            + (f"did you mean {near!r}?" if near else f"use 'bytes', a path, or one of {', '.join(names)}")
        )


def _find(encoding: str) -> Codec:
    if encoding == "bytes":
        ranks = {bytes([value]): value for value in range(256)}
        # Cut anywhere: a byte is a token whatever stands beside it, and long pieces are fast.
        return _of_ranks("bytes", r"[\s\S]{1,64}", ranks, ["<|endoftext|>"])
    path = Path(encoding)
    if (path / "tokenizer.json").is_file():  # as a model's folder has it
        path = path / "tokenizer.json"
    if path.suffix == ".json" and path.is_file():
        return _HuggingFace(path)
    if path.is_file():
        # Llama 3's first special token begins a text, the second ends it.
        return _of_ranks(encoding, WORDS, _read_ranks(path), ["<|begin_of_text|>", "<|end_of_text|>"])
    check_name(encoding)
    try:
        found = tiktoken.get_encoding(encoding)
    except OSError as error:  # requests' errors are OSErrors
        raise UserError(f"tokenizer.encoding = {encoding!r}: {_how_to_place(error)}") from None
    return _TikToken(found)


def _how_to_place(error: OSError) -> str:
    """What to put where, on a machine that cannot download what tiktoken wants."""
    url = getattr(getattr(error, "request", None), "url", None)
    failed = f"tiktoken has to download it once and could not ({type(error).__name__}); connect this machine, or "
    if url is None:
        return f"{failed}fetch it elsewhere and set TIKTOKEN_CACHE_DIR to the folder"
    name = hashlib.sha1(url.encode()).hexdigest()  # as tiktoken names it
    return f"{failed}fetch {url} elsewhere, put it into a folder as {name}, and set TIKTOKEN_CACHE_DIR to the folder"


def _of_ranks(name: str, pattern: str, ranks: dict[bytes, int], special: list[str]) -> Codec:
    tokens = {token: len(ranks) + index for index, token in enumerate(special)}
    return _TikToken(tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=tokens))


def _import_tokenizers(path: Path) -> Any:
    try:
        import tokenizers  # only here: most recipes do without
    except ImportError:
        raise UserError(f"{path} wants Hugging Face's tokenizers: pip install 'titanlike[data]'") from None
    return tokenizers


def _content(token: Any) -> str:
    """A token's text: `tokenizer_config.json` has it as it is, or in a table."""
    return (token.get("content") if isinstance(token, dict) else token) or ""


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
