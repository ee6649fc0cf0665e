"""Tokenizers, through tiktoken or Hugging Face's tokenizers. No torch."""

import base64
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tiktoken

from titanlike.config import UserError
from titanlike.config.base import nearest, shown
from titanlike.config.sections import Tokenizer as Section
from titanlike.data.documents.data_files import import_optional
from titanlike.data.documents.readers import BadRecord
from titanlike.data.tokens.byte_pairs import byte_letters, odd_texts, read_byte_pairs
from titanlike.utils.live_line import print_line

# Splits text before the byte-pair merges, as Llama 3 and OpenAI's cl100k do.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Common names of the special tokens, for tokenizers that do not name theirs.
COMMON_NAMES = {
    "eos": ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>", "<|endofprompt|>", "[SEP]"),
    "bos": ("<|begin_of_text|>", "<s>", "<bos>", "<|bos|>", "<|startoftext|>", "[CLS]"),
}

# Of several scripts, with spaces, digits and code: a tokenizer that splits text otherwise has other tokens for it.
PROBE = (
    "def f(x):\n    return x**2  # 3.14159, 2026\n\nThe quick brown fox; Größe, naïveté, 東京, Москва, 🙂!\t  <tag/>\n"
)

NUM_COMPARED = 2**14  # characters of an input for which tiktoken has to give the tokens of the tokenizers library

TokenIDs = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Separator:
    """The special token between documents: the last token of a document if it closes one (EOS), else the first (BOS)."""

    token: int
    closes: bool


class Tokenizer:
    """Encodes and decodes text, and adds special tokens to documents."""

    def __init__(
        self,
        codec: "_TiktokenCodec | _HuggingFaceCodec",
        section: Section,
        model_vocab_size: int | None = None,
        weights: str = "",
    ) -> None:
        """`weights` are those that the model's vocabulary is from, if any."""
        self.codec = codec
        self.vocab_size = min(codec.vocab_size, model_vocab_size or codec.vocab_size)
        self.section, self.weights = section, weights
        self.special_names = {number: name for name, number in codec.special.items()}
        self.eos = self._special_token("eos", codec.eos) if section.special != "bos" else None
        self.bos = self._special_token("bos", codec.bos) if section.special != "eos" else None
        if self.bos == self.eos:
            raise UserError(
                f"tokenizer.special = 'both' requires two tokens, but tokenizer.encoding = {section.encoding!r} has the same one "
                "for both; use 'eos'"
            )

    @property
    def separator(self) -> Separator:
        """The token that separates documents."""
        token = self.bos if self.eos is None else self.eos
        assert token is not None
        return Separator(token, closes=self.eos is not None)

    @property
    def dtype(self) -> type[np.uint16] | type[np.uint32]:
        """The smallest unsigned integer type that holds every token."""
        return np.uint16 if self.codec.vocab_size <= 2**16 else np.uint32

    @property
    def fingerprint(self) -> str:
        """A hash that is equal for tokenizers that produce the same tokens."""
        return hashlib.sha256(self.codec.identity + repr((self.bos, self.eos)).encode()).hexdigest()[:16]

    def difference(self, other: "Tokenizer") -> str:
        """Returns the first difference that makes tokens of this tokenizer others in another one; "" if there is none. The other
        one may have more tokens."""
        tokens = other.codec.tokens
        for token, number in sorted(self.codec.tokens.items(), key=lambda item: item[1]):
            if tokens.get(token) != number:
                return f"{shown(repr(token))} has the id {number}, and {tokens.get(token, 'none')} there"
        merges = self.codec.merges, other.codec.merges
        if None not in merges and merges[0] != merges[1]:
            return "the merges differ"
        return "" if self.encode(PROBE).tolist() == other.encode(PROBE).tolist() else "text is split otherwise"

    def encode(self, text: str) -> TokenIDs:
        """Encodes a text. Names of special tokens in it are encoded as plain text."""
        return self._check(self.codec.encode_batch([text])[0])

    def encode_with_special(self, text: str) -> tuple[TokenIDs, npt.NDArray[np.int64]]:
        """Encodes a text in which names of special tokens are these tokens. Returns the tokens and the characters before the end
        of each."""
        tokens, ends = self.codec.encode_with_special(text)
        return self._check(tokens), ends

    def _check(self, tokens: TokenIDs) -> TokenIDs:
        if self.vocab_size < self.codec.vocab_size and tokens.max(initial=0) >= self.vocab_size:
            raise BadRecord(f"the text has {self.outside_model(int(tokens.max()))}")
        return tokens

    def outside_model(self, token: int) -> str:
        """Describes a token that the model does not have, with the remedy."""
        return (
            f"{self.codec.decode([token])}, token {token} of tokenizer.encoding = {self.section.encoding!r}, but "
            f"model.vocab_size = {self.vocab_size}; remove it from the data, or {self.remedy(token + 1)}"
        )

    def remedy(self, num_tokens: int) -> str:
        """Returns what makes a model fit this number of tokens."""
        if self.weights:
            return f"use the tokenizer of {self.weights}, whose weights have no row for more tokens"
        return f"set model.vocab_size = {-(-num_tokens // 64) * 64}"

    def opening(self, text: str) -> list[int]:
        """Encodes the start of a document, which has at least one token."""
        begin = [] if self.bos is None else [self.bos]
        return begin + self.encode(text).tolist() or [self.separator.token]

    def document(
        self, text: str | TokenIDs, prompt: str = "", *, first: bool = True, last: bool = True
    ) -> tuple[TokenIDs, int]:
        """Encodes a document, with special tokens, or a chunk of one: BOS precedes its first chunk, EOS follows its last. The codec
        may have encoded its text. Returns the tokens, and how many at the start belong to the prompt, which is excluded from the
        loss."""
        bos = [] if self.bos is None or not first else [np.array([self.bos], np.uint32)]
        eos = [] if self.eos is None or not last else [np.array([self.eos], np.uint32)]
        prompt_parts = [*bos, self.encode(prompt)] if prompt else []
        tokens = self.encode(text) if isinstance(text, str) else self._check(text)
        return np.concatenate([*(prompt_parts or bos), tokens, *eos]), sum(map(len, prompt_parts))

    def decode(self, tokens: Sequence[int]) -> str:
        """Decodes tokens without BOS and EOS. Invalid UTF-8 becomes a replacement character."""
        return self.codec.decode([token for token in tokens if token not in (self.bos, self.eos)])

    def check_special(self, key: str, name: str) -> None:
        """Raises if a key has the name of a token that is not a special one."""
        special = self.codec.special
        if name and name not in special:
            near = nearest(name, list(special))
            raise UserError(
                f"{key} = {name!r} is not a special token of tokenizer.encoding = {self.section.encoding!r}; "
                + (f"did you mean {near!r}?" if near else f"it has {', '.join(special) or 'none'}")
            )

    def _special_token(self, role: str, default: str) -> int:
        """Returns the EOS or BOS token: the one that the recipe names, or else the tokenizer's default."""
        special, name = self.codec.special, getattr(self.section, role)
        self.check_special(f"tokenizer.{role}", name)
        for candidate in [name] if name else [default, *COMMON_NAMES[role]]:
            if candidate in special:
                return special[candidate]
        raise UserError(
            f"tokenizer.encoding = {self.section.encoding!r} does not name its {role.upper()} token; set tokenizer.{role} "
            f"to one of its special tokens: {', '.join(map(shown, special)) or 'it has none'}"
        )


class _TiktokenCodec:
    """A tiktoken encoding."""

    eos, bos = "<|endoftext|>", ""
    merges = None  # they follow from the ranks

    def __init__(self, encoding: tiktoken.Encoding, matched: Iterable[str] = ()) -> None:
        """`matched` are names in a text that are always encoded as special tokens."""
        self.encoding, self.matched = encoding, set(matched)
        self.config: dict[str, Any] = {}
        self.special = encoding._special_tokens
        self.vocab_size = encoding.n_vocab
        self.num_ordinary = 1 + max(encoding._mergeable_ranks.values())

    def with_special(self, names: list[str]) -> "_TiktokenCodec":
        """Returns the encoding with further special tokens."""
        old = self.encoding
        special = old._special_tokens | {name: old.n_vocab + index for index, name in enumerate(names)}
        ranks, pattern = old._mergeable_ranks, old._pat_str
        return _TiktokenCodec(tiktoken.Encoding("", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special))

    @property
    def identity(self) -> bytes:
        digest = hashlib.sha256(self.encoding._pat_str.encode())
        for table in (self.encoding._mergeable_ranks, self.encoding._special_tokens):
            for token, number in sorted(table.items(), key=lambda item: item[1]):
                digest.update(f"{token!r} {number} ".encode())
        return digest.digest()

    @property
    def tokens(self) -> dict[str, int]:
        """All tokens, spelled as in a `tokenizer.json`."""
        letters = byte_letters()
        ranks = self.encoding._mergeable_ranks.items()
        return {"".join(letters[byte] for byte in token): rank for token, rank in ranks} | self.special

    def begin_input(self) -> None: ...

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIDs]:
        encode = partial(self.encoding.encode_to_numpy, allowed_special=self.matched, disallowed_special=())
        return list(map(encode, texts))

    def encode_with_special(self, text: str) -> tuple[TokenIDs, npt.NDArray[np.int64]]:
        tokens = self.encoding.encode_to_numpy(text, allowed_special="all")
        sizes = [len(token) for token in self.encoding.decode_tokens_bytes(tokens.tolist())]
        # A token that ends within a character ends after it.
        characters = np.cumsum(np.frombuffer(text.encode(), np.uint8) & 0xC0 != 0x80)
        return tokens, characters[np.cumsum(sizes, dtype=np.int64) - 1]

    def decode(self, tokens: Sequence[int]) -> str:
        return self.encoding.decode(tokens)


class _HuggingFaceCodec:
    """A `tokenizer.json`, with the special tokens that the `tokenizer_config.json` beside it names."""

    def __init__(self, path: Path) -> None:
        tokenizers = import_optional("tokenizers", str(path))
        self.path = path
        try:
            self.tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001  the library raises no narrower type
            raise UserError(
                f"{path}: not a tokenizer.json that the tokenizers library can read: {shown(str(error))}"
            ) from None
        self.tokenizer.encode_special_tokens = True  # encodes their names in a text as plain text
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        added = self.tokenizer.get_added_tokens_decoder()
        self.special = {token.content: number for number, token in added.items() if token.special}
        numbers = self.tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size = 1 + max(numbers, default=-1)
        self.num_ordinary = 1 + max(set(numbers) - added.keys(), default=-1)
        if not self.vocab_size:
            raise UserError(f"{path}: the vocabulary is empty; give a tokenizer that has tokens")
        self.config, (self.eos, self.bos) = _read_config(path.with_name("tokenizer_config.json"))
        self.identity = self.tokenizer.to_str().encode()
        self._normalize = getattr(self.tokenizer.normalizer, "normalize_str", str)
        self.begin_input()

    @property
    def tokens(self) -> dict[str, int]:
        """All tokens."""
        return dict(self.tokenizer.get_vocab(with_added_tokens=True))

    @property
    def merges(self) -> Any:
        """What decides between tokens of the same text: byte pairs in order, or the scores of a unigram model."""
        model = json.loads(self.identity)["model"]
        return model.get("merges", model["vocab"])

    def with_special(self, names: list[str]) -> "_HuggingFaceCodec":
        """Returns the tokenizer with further special tokens."""
        codec = _HuggingFaceCodec(self.path)
        codec.tokenizer.add_special_tokens(names)
        codec.special |= {name: self.vocab_size + index for index, name in enumerate(names)}
        codec.vocab_size += len(names)
        return codec

    def begin_input(self) -> None:
        """Says that the next texts are of another input, for which tiktoken has to be compared with the library."""
        self._first = ""
        self._fast: _TiktokenCodec | None = None

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIDs]:
        fast = self._fast_for(texts)
        return self._encode_fast(fast, texts) if fast else self._encode(texts)

    def encode_with_special(self, text: str) -> tuple[TokenIDs, npt.NDArray[np.int64]]:
        if (fast := self._fast_for([text])) and self._normalize(text) == text:
            with suppress(ValueError):
                return fast.encode_with_special(text)
        self.tokenizer.encode_special_tokens = False
        try:
            with self._library_errors():
                encoding = self.tokenizer.encode(text, add_special_tokens=False)
        finally:
            self.tokenizer.encode_special_tokens = True
        return np.array(encoding.ids, np.uint32), np.array([end for _, end in encoding.offsets], np.int64)

    def _encode(self, texts: Sequence[str]) -> list[TokenIDs]:
        # The batch variant does not compute character offsets, which are not needed.
        with self._library_errors():
            encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def _encode_fast(self, fast: _TiktokenCodec, texts: Sequence[str]) -> list[TokenIDs]:
        normalized = [text if text.isascii() else self._normalize(text) for text in texts]
        changed = [text + new for text, new in zip(texts, normalized, strict=True) if new != text]
        # The library matches added tokens before it normalizes, and a pattern may backtrack more often than tiktoken's limit.
        if not any(name in text for name in fast.special for text in changed):
            with suppress(ValueError):
                return fast.encode_batch(normalized)
        return self._encode(texts)

    def _fast_for(self, texts: Sequence[str]) -> _TiktokenCodec | None:
        """Returns tiktoken's encoding if it has the library's tokens for the first texts of an input, which these may be."""
        if len(self._first) < NUM_COMPARED:
            self._first = (self._first + "".join(texts))[:NUM_COMPARED]
            if len(self._first) == NUM_COMPARED and self._tiktoken and self._agrees(self._tiktoken, [self._first]):
                self._fast = self._tiktoken
        return self._fast

    @cached_property
    def _tiktoken(self) -> _TiktokenCodec | None:
        encoding = read_byte_pairs(self.tokenizer, json.loads(self.identity))
        codec = encoding and _TiktokenCodec(encoding, encoding._special_tokens.keys() - self.special.keys())
        return codec if codec and self._agrees(codec, ["".join(codec.special), *odd_texts()]) else None

    def _agrees(self, fast: _TiktokenCodec, texts: Sequence[str]) -> bool:
        """Whether tiktoken's encoding has the library's tokens for texts. If not, a line says so."""
        for text, tokens, expected in zip(texts, self._encode_fast(fast, texts), self._encode(texts), strict=True):
            if not np.array_equal(tokens, expected):
                problem = (
                    f"tiktoken has other tokens for {shown(repr(text))}; the tokenizers library encodes, more slowly"
                )
                print_line(f"warning: {self.path}: {problem}", sys.stderr)
                return False
        return True

    def decode(self, tokens: Sequence[int]) -> str:
        with self._library_errors():
            return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))

    @contextmanager
    def _library_errors(self) -> Iterator[None]:
        """Raises `UserError` if the library fails on a text, as with a pattern that backtracks more often than its limit."""
        try:
            yield
        except BaseException as error:
            # A panic of the library is not an Exception, and its class cannot be imported.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise UserError(
                f"{self.path}: the tokenizers library fails on a text: {shown(str(error))}; repair the file, such as its pattern"
            ) from None


def _read_config(config: Path) -> tuple[dict[str, Any], list[str]]:
    """Returns the content of a `tokenizer_config.json`, empty if it does not exist, and the names of EOS and BOS in it, or ""."""
    if not config.exists():
        return {}, ["", ""]
    try:
        values: dict[str, Any] = json.loads(config.read_bytes())
        named = [values.get(f"{role}_token") for role in ("eos", "bos")]
        names = ["" if t is None else t["content"] if isinstance(t, dict) else t for t in named]
        if not all(isinstance(name, str) for name in names):
            raise ValueError("eos_token and bos_token must be texts")
    except OSError as error:
        raise UserError(f"{config}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(f"{config}: not a tokenizer_config.json ({error}); repair or delete it") from None
    return values, names


def build_tokenizer(section: Section, model_vocab_size: int | None = None, weights: str = "") -> Tokenizer:
    """Builds the tokenizer of a recipe. Raises if the model's vocabulary does not have its ordinary tokens, EOS and BOS. Added
    tokens may be missing there, as `<image_soft_token>` in Gemma 3 of 1B: only a text with one is refused."""
    tokenizer = Tokenizer(_build_codec(section.encoding), section, model_vocab_size, weights)
    num_needed = max(tokenizer.codec.num_ordinary, 1 + (tokenizer.eos or 0), 1 + (tokenizer.bos or 0))
    if num_needed > tokenizer.vocab_size:
        raise UserError(
            f"model.vocab_size = {model_vocab_size} is smaller than the {num_needed} tokens of "
            f"tokenizer.encoding = {section.encoding!r}; {tokenizer.remedy(tokenizer.codec.vocab_size)}"
        )
    return tokenizer


def with_sentinels(tokenizer: Tokenizer, model_vocab_size: int) -> Tokenizer:
    """Returns the tokenizer of an encoder-decoder with sentinels `<extra_id_0>`, ... among its special tokens. If it has none, they
    are the rows of the model that follow its tokens, from the last one on."""
    if "<extra_id_0>" in tokenizer.codec.special:
        return tokenizer
    names = [f"<extra_id_{index}>" for index in reversed(range(model_vocab_size - tokenizer.codec.vocab_size))]
    return Tokenizer(tokenizer.codec.with_special(names), tokenizer.section, model_vocab_size, tokenizer.weights)


def files_of(encoding: str) -> list[Path]:
    """Returns the files of a tokenizer, the main one first. Built-in and tiktoken encodings have none."""
    path = Path(encoding)
    if (path / "tokenizer.json").is_file():  # a model's folder
        path = path / "tokenizer.json"
    if encoding == "bytes" or not path.is_file():
        return []
    config = path.with_name("tokenizer_config.json")
    return [path, config] if path.suffix == ".json" and config.is_file() else [path]


def check_name(encoding: str) -> None:
    """Raises if `encoding` is not the name of a tiktoken encoding."""
    names = tiktoken.list_encoding_names()
    if encoding not in names:
        near = nearest(encoding, ["bytes", *names])
        raise UserError(
            f"tokenizer.encoding = {encoding!r} is neither a file nor a tiktoken encoding; "
            + (f"did you mean {near!r}?" if near else f"use 'bytes', a path, or one of {', '.join(names)}")
        )


def _build_codec(encoding: str) -> _TiktokenCodec | _HuggingFaceCodec:
    if encoding == "bytes":
        ranks = {bytes([value]): value for value in range(256)}
        # A byte is a token in any context, so any split is correct, and long ones are fast.
        return _codec_from_ranks("bytes", r"[\s\S]{1,64}", ranks, ["<|endoftext|>"])
    if files := files_of(encoding):
        if files[0].suffix == ".json":
            return _HuggingFaceCodec(files[0])
        # Of Llama 3's special tokens, the first is BOS and the second EOS.
        return _codec_from_ranks(
            encoding, SPLIT_PATTERN, _read_ranks(files[0]), ["<|begin_of_text|>", "<|end_of_text|>"]
        )
    check_name(encoding)
    try:
        return _TiktokenCodec(tiktoken.get_encoding(encoding))
    except OSError as error:  # includes the errors of requests
        url = getattr(getattr(error, "request", None), "url", None)
        file = "it elsewhere"
        if url:
            name = hashlib.sha1(url.encode()).hexdigest()  # tiktoken's name for the file
            file = f"{url} elsewhere, save it as {name} in a folder,"
        raise UserError(
            f"tokenizer.encoding = {encoding!r}: tiktoken cannot download it ({type(error).__name__}); connect this machine to "
            f"the network, or download {file} and set TIKTOKEN_CACHE_DIR to its folder"
        ) from None


def _codec_from_ranks(name: str, pattern: str, ranks: dict[bytes, int], special: list[str]) -> _TiktokenCodec:
    tokens = {token: len(ranks) + index for index, token in enumerate(special)}
    return _TiktokenCodec(tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=tokens))


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
    missing = [value for value in range(256) if bytes([value]) not in ranks]
    if missing or sorted(ranks.values()) != list(range(len(ranks))):
        raise UserError(
            f"{path}: not a complete rank file: "
            + (f"byte {missing[0]} has no rank" if missing else "its ranks are not consecutive from 0")
        )
    return ranks
