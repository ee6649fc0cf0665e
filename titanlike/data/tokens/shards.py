"""Token shards, written by `titanlike data prepare` and read in training. No torch.

A folder holds `manifest.json` and two files per shard, both little-endian arrays without a header:
`train-00000.tokens`, uint16 or uint32, the concatenated documents; and `train-00000.documents`, two int64 per document: its end
offset, and the offset of its first label (after the prompt, if it has one). Files are read by byte range, also local ones: if a
memory-mapped file is cut while it is read, the kernel kills the process.
"""

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
from pydantic import Field

from titanlike.config import UserError
from titanlike.config.base import record, validate
from titanlike.data.documents.directory import DataDirectory
from titanlike.data.tokens.arrays import Numbers
from titanlike.utils.atomic_write import atomic_write_text

if TYPE_CHECKING:
    from titanlike.data.tokens.tokenizer import Tokenizer

MANIFEST = "manifest.json"
FORMAT = 2
TRAIN, VALIDATION, TEST = "train", "validation", "test"
NUM_SAMPLES, SAMPLE_SIZE = 128, 512  # blocks of a split that its fingerprint covers, and tokens or documents in a block
DAMAGED = "copy it again, or prepare the data again"

Count = Annotated[int, Field(ge=0, lt=2**60)]


@record
class Shard:
    """The manifest's entry of one shard."""

    name: Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
    tokens: Count
    documents: Count
    tokens_sha256: str
    documents_sha256: str
    prompt_tokens: Count = 0  # excluded from the loss


@record
class Manifest:
    """The content of `manifest.json`."""

    dtype: Literal["uint16", "uint32"]
    tokenizer: dict[str, Any]  # fingerprint and recipe section
    splits: dict[str, list[Shard]]
    source: dict[str, Any]  # provenance, for users
    skipped: int = 0  # unreadable records

    def write(self, folder: Path) -> None:
        """Writes the manifest. Must come last, since it marks the folder as complete."""
        atomic_write_text(folder / MANIFEST, json.dumps({"format": FORMAT} | asdict(self), indent=1))

    @property
    def fingerprint(self) -> str:
        """Hash of the tokens and document boundaries of all shards."""
        hashes = [[shard.tokens_sha256, shard.documents_sha256] for shards in self.splits.values() for shard in shards]
        return hashlib.sha256(json.dumps([self.dtype, self.tokenizer["fingerprint"], hashes]).encode()).hexdigest()[:16]


def read_manifest(path: str, folder: DataDirectory | None = None) -> Manifest:
    """Reads the manifest of a local or remote folder."""
    folder = folder or DataDirectory(path)
    try:
        values = json.loads(folder.read(MANIFEST))
    except FileNotFoundError:
        if folder.local and not folder.path("").exists():
            raise UserError(f"{path}: no such folder of token shards") from None
        raise UserError(
            f"{path} is not a folder of token shards: it has no {MANIFEST}; create it with `titanlike data prepare`, or give the "
            ".bin files of Megatron-LM, llm.c or nanoGPT"
        ) from None
    except OSError as error:
        raise UserError(f"{path}/{MANIFEST} cannot be read: {error}") from None
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}/{MANIFEST} is not JSON: {error}; prepare the data again") from None
    try:
        number = values.pop("format")
        if number != FORMAT:
            raise UserError(
                f"{path}/{MANIFEST} has format {number}, but this version reads format {FORMAT}; prepare the data again"
            )
        manifest = validate(Manifest, values)
        if not isinstance(manifest.tokenizer.get("fingerprint"), str):
            raise ValueError("tokenizer.fingerprint: must be a string")
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path}/{MANIFEST} is not a manifest of token shards ({error}); prepare the data again"
        ) from None
    return manifest


class _Span(NamedTuple):
    """Consecutive tokens of a shard, and where they go in the result of a read."""

    place: int
    shard: Shard
    start: int
    length: int


class Shards:
    """The tokens of one split as a single array."""

    remedy = DAMAGED

    def __init__(self, path: str, split: str = TRAIN, *, tokenizer: "Tokenizer | None" = None) -> None:
        """With a tokenizer, tokens that it or its model does not have are refused when they are read."""
        self.path = path
        self.tokenizer = tokenizer
        self.folder, self.manifest = self._open(path)
        self.shards = self.manifest.splits.get(split, [])
        self.dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
        self.offsets = np.cumsum([0] + [shard.tokens for shard in self.shards])
        self.has_prompts = any(shard.prompt_tokens for shard in self.shards)
        self._documents: dict[str, Numbers] = {}
        self._check_files()

    def _open(self, path: str) -> tuple[DataDirectory, Manifest]:
        folder = DataDirectory(path)
        return folder, read_manifest(path, folder)

    def _check_files(self) -> None:
        sizes = self.folder.sizes()
        if sizes is not None:  # None: the server cannot list files
            for shard in self.shards:
                self._check_size(f"{shard.name}.tokens", shard.tokens * self.dtype.itemsize, sizes)
                self._check_size(f"{shard.name}.documents", shard.documents * 16, sizes)

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    @property
    def num_documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of the manifest and of samples of the files, which may have been replaced by others of the same size. Reads a
        bounded number of blocks; `verify` reads everything."""
        digest = hashlib.sha256(self.manifest.fingerprint.encode())
        length = min(SAMPLE_SIZE, self.num_tokens)
        digest.update(self.read(np.linspace(0, self.num_tokens - length, NUM_SAMPLES).astype(np.int64), length).data)
        for content in self._sample_documents():
            digest.update(content)
        return digest.hexdigest()[:16]

    def _sample_documents(self) -> Iterator[bytes]:
        """Reads the last documents of some shards, and checks them."""
        shards = [shard for shard in self.shards if shard.documents]
        shards = shards[:: -(-len(shards) // NUM_SAMPLES) or 1]
        first_rows = [max(shard.documents - SAMPLE_SIZE, 0) for shard in shards]
        ranges = [(_documents_of(s), 16 * first, 16 * s.documents) for s, first in zip(shards, first_rows, strict=True)]
        for shard, first, content in zip(shards, first_rows, self.folder.ranges(ranges), strict=True):
            self._check_documents(shard, content, is_first=not first)
            yield content

    def read(self, starts: Numbers, length: int) -> Numbers:
        """Returns `length` tokens from each start (N, length)."""
        return self.read_pieces(starts, np.full(len(starts), length)).reshape(len(starts), length)

    def read_pieces(self, starts: Numbers, lengths: Numbers) -> Numbers:
        """Returns some tokens from each start, one piece after the other."""
        spans = list(self._spans(starts, lengths))
        ranges = [self._range_of(span.shard, span.start, span.start + span.length) for span in spans]
        content = b"".join(self.folder.ranges(ranges))  # spans are in the order of the result
        result = np.frombuffer(content, self.dtype).astype(np.int64)
        if self.tokenizer and result.view(np.uint64).max(initial=0) >= self.tokenizer.vocab_size:
            self._refuse_token(self.tokenizer, spans, result)
        return result

    def _range_of(self, shard: Shard, start: int, stop: int) -> tuple[str, int, int]:
        """Returns the file of a shard and the byte range of some of its tokens."""
        return f"{shard.name}.tokens", start * self.dtype.itemsize, stop * self.dtype.itemsize

    def loss_mask(self, starts: Numbers, length: int) -> npt.NDArray[np.bool_] | None:
        """Returns which of these tokens are labels (N, length), or None if there are no prompts."""
        if not self.has_prompts:
            return None
        return self.loss_mask_of_pieces(starts, np.full(len(starts), length)).reshape(len(starts), length)

    def loss_mask_of_pieces(self, starts: Numbers, lengths: Numbers) -> npt.NDArray[np.bool_]:
        """Returns which of the tokens that `read_pieces` returns are labels."""
        result = np.empty(int(lengths.sum()), bool)
        for place, shard, start, count in self._spans(starts, lengths):
            ends, first_labels = self._read_documents(shard).T
            offsets = np.arange(start, start + count)
            documents = np.searchsorted(ends, offsets, side="right")
            result[place : place + count] = offsets >= first_labels[documents]
        return result

    def document_lengths(self, shard: Shard) -> Numbers:
        """Returns the number of tokens of each document of a shard (N,)."""
        return np.diff(self._read_documents(shard)[:, 0], prepend=0)

    def verify(self) -> None:
        """Reads all files and raises `UserError` at the first whose hash differs from the manifest."""
        for shard in self.shards:
            for kind, expected in (("tokens", shard.tokens_sha256), ("documents", shard.documents_sha256)):
                name = f"{shard.name}.{kind}"
                if hashlib.sha256(self.folder.read(name)).hexdigest() != expected:
                    raise UserError(f"{self.path}/{name} does not match its hash in the manifest; {DAMAGED}")

    def _spans(self, starts: Numbers, lengths: Numbers) -> Iterator[_Span]:
        """Splits each range of tokens at the shard boundaries."""
        numbers = np.searchsorted(self.offsets, starts, side="right") - 1  # one call: its overhead exceeds the search
        place = 0
        for start, length, number in zip(starts.tolist(), lengths.tolist(), numbers.tolist(), strict=True):
            assert start >= 0 and start + length <= self.num_tokens
            end = place + length
            while place < end:
                shard, first = self.shards[number], start - int(self.offsets[number])
                count = min(end - place, shard.tokens - first)
                if count:  # shards may be empty
                    yield _Span(place, shard, first, count)
                place += count
                start += count
                number += 1

    def _read_documents(self, shard: Shard) -> Numbers:
        """Returns the end and the first label of each document of a shard (N, 2)."""
        if shard.name not in self._documents:
            content = self.folder.read(_documents_of(shard))
            self._documents[shard.name] = self._check_documents(shard, content, is_first=True)
        return self._documents[shard.name]

    def _check_documents(self, shard: Shard, content: bytes, *, is_first: bool) -> Numbers:
        """Parses the last documents of a shard, of which the first begins the shard if `is_first`. Refuses contradictions."""
        rows = np.frombuffer(content[: len(content) // 16 * 16], "<i8").reshape(-1, 2)
        ends, first_labels = rows.T
        starts = np.concatenate([[0 if is_first else first_labels[0]], ends[:-1]]) if len(rows) else ends
        is_valid = (starts <= first_labels).all() and (first_labels <= ends).all()
        if not is_valid or (ends[-1] if len(rows) else 0) != shard.tokens:
            raise UserError(f"{self.path}/{_documents_of(shard)} does not fit the tokens of the shard; {DAMAGED}")
        return rows

    def _refuse_token(self, tokenizer: "Tokenizer", spans: Sequence[_Span], tokens: Numbers) -> NoReturn:
        """Raises `UserError` with the position of the first token that is not in the vocabulary."""
        for place, shard, start, length in spans:
            [wrong] = np.nonzero(tokens[place : place + length].view(np.uint64) >= tokenizer.vocab_size)
            if len(wrong):
                file, position = f"{self.folder.location}/{self._range_of(shard, 0, 0)[0]}", start + wrong[0]
                token, num_tokens = int(tokens[place + wrong[0]]), tokenizer.codec.vocab_size
                if 0 <= token < num_tokens:
                    raise UserError(f"{file} has at {position} {tokenizer.outside_model(token)}")
                raise UserError(
                    f"{file} is damaged: token {position} is {token}, but the tokenizer has {num_tokens}; {self.remedy}"
                )
        raise AssertionError

    def _check_size(self, name: str, expected: int, sizes: Mapping[str, int]) -> None:
        if name not in sizes:
            raise UserError(f"{self.path}/{name} is missing; {DAMAGED}")
        if sizes[name] != expected:
            problem = "truncated" if sizes[name] < expected else "too long"
            raise UserError(
                f"{self.path}/{name} is {problem}: it has {sizes[name]} bytes, but the manifest says {expected}; {DAMAGED}"
            )


def _documents_of(shard: Shard) -> str:
    return f"{shard.name}.documents"


def totals(shards: Sequence[Shard]) -> tuple[int, int]:
    """Returns the number of tokens and documents of shards."""
    return sum(shard.tokens for shard in shards), sum(shard.documents for shard in shards)
