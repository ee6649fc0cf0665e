"""Token shards, written by `titanlike data prepare` and read in training. No torch.

A folder holds `manifest.json` and two files per shard, both little-endian arrays without a header:
`train-00000.tokens`, uint16 or uint32, the concatenated documents; and `train-00000.documents`, two int64 per document: its end
offset, and the offset of its first label (after the prompt, if it has one). Local shards are memory-mapped; remote ones are read
by byte range.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from titanlike.config import UserError
from titanlike.data.shuffle import Numbers
from titanlike.data.text.files import DataDirectory
from titanlike.utils.atomic_io import atomic_write_text, atomic_writer, write_all

MANIFEST = "manifest.json"
FORMAT = 2
TRAIN, VALIDATION = "train", "validation"


@dataclass(frozen=True)
class Shard:
    """The manifest's entry of one shard."""

    name: str
    tokens: int
    documents: int
    tokens_sha256: str
    documents_sha256: str
    prompt_tokens: int = 0  # excluded from the loss


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`."""

    dtype: str
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
            f"{path} is not a folder of token shards: it has no {MANIFEST}; create it with `titanlike data prepare`"
        ) from None
    except OSError as error:
        raise UserError(f"{path}/{MANIFEST} cannot be read: {error}") from None
    except ValueError as error:
        raise UserError(f"{path}/{MANIFEST} is not JSON: {error}; prepare the data again") from None
    try:
        number = values.pop("format")
        if number != FORMAT:
            raise UserError(
                f"{path}/{MANIFEST} has format {number}, but this version reads format {FORMAT}; prepare the data again"
            )
        splits = {name: [Shard(**shard) for shard in shards] for name, shards in values.pop("splits").items()}
        manifest = Manifest(splits=splits, **values)
        _ = np.dtype(manifest.dtype), manifest.tokenizer["fingerprint"]
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path}/{MANIFEST} is not a manifest of token shards ({error}); prepare the data again"
        ) from None
    return manifest


class _Span(NamedTuple):
    """Consecutive tokens of a shard, and where they go in the result of a read."""

    row: int
    column: int
    shard: Shard
    start: int
    length: int


class Shards:
    """The tokens of one split as a single array."""

    def __init__(self, path: str, split: str = TRAIN) -> None:
        self.path = path
        self.folder = DataDirectory(path)
        self.manifest = read_manifest(path, self.folder)
        self.shards = self.manifest.splits.get(split, [])
        self.dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
        self.offsets = np.cumsum([0] + [shard.tokens for shard in self.shards])
        self.has_prompts = any(shard.prompt_tokens for shard in self.shards)
        self._arrays: dict[str, npt.NDArray[Any]] = {}
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

    @property
    def fingerprint(self) -> str:
        return self.manifest.fingerprint

    def read(self, starts: Numbers, length: int) -> Numbers:
        """Returns `length` tokens from each start (N, length)."""
        result = np.empty((len(starts), length), np.int64)
        spans = list(self._spans(starts, length))
        for span, tokens in zip(spans, self._read_spans(spans), strict=True):
            result[span.row, span.column : span.column + span.length] = tokens
        return result

    def loss_mask(self, starts: Numbers, length: int) -> npt.NDArray[np.bool_] | None:
        """Returns which of these tokens are labels (N, length), or None if there are no prompts."""
        if not self.has_prompts:
            return None
        result = np.empty((len(starts), length), bool)
        for row, column, shard, start, count in self._spans(starts, length):
            ends, first_labels = self._documents(shard).T
            offsets = np.arange(start, start + count)
            documents = np.searchsorted(ends, offsets, side="right")
            result[row, column : column + count] = offsets >= first_labels[documents]
        return result

    def document_lengths(self, shard: Shard) -> Numbers:
        """Returns the number of tokens of each document of a shard (N,)."""
        return np.diff(self._documents(shard)[:, 0], prepend=0)

    def verify(self) -> None:
        """Reads all files and raises `UserError` at the first whose hash differs from the manifest."""
        for shard in self.shards:
            for kind, expected in (("tokens", shard.tokens_sha256), ("documents", shard.documents_sha256)):
                name = f"{shard.name}.{kind}"
                if hashlib.sha256(self.folder.read(name)).hexdigest() != expected:
                    raise UserError(
                        f"{self.path}/{name} does not match its hash in the manifest; copy it again, or prepare the data again"
                    )

    def _spans(self, starts: Numbers, length: int) -> Iterator[_Span]:
        """Splits each range of `length` tokens at the shard boundaries."""
        for row, start in enumerate(starts.tolist()):
            assert start >= 0 and start + length <= self.num_tokens
            number, column = int(np.searchsorted(self.offsets, start, side="right")) - 1, 0
            while column < length:
                shard, first = self.shards[number], start + column - int(self.offsets[number])
                count = min(length - column, shard.tokens - first)
                if count:  # shards may be empty
                    yield _Span(row, column, shard, first, count)
                column += count
                number += 1

    def _read_spans(self, spans: Sequence[_Span]) -> Iterator[npt.NDArray[Any]]:
        if self.folder.local:
            for span in spans:
                yield self._array(f"{span.shard.name}.tokens", self.dtype)[span.start : span.start + span.length]
            return
        width = self.dtype.itemsize
        ranges = [(f"{s.shard.name}.tokens", s.start * width, (s.start + s.length) * width) for s in spans]
        for content in self.folder.ranges(ranges):
            yield np.frombuffer(content, self.dtype)

    def _documents(self, shard: Shard) -> Numbers:
        return self._array(f"{shard.name}.documents", np.dtype("<i8")).reshape(-1, 2)

    def _array(self, name: str, dtype: "np.dtype[Any]") -> npt.NDArray[Any]:
        if name not in self._arrays:
            if self.folder.local:
                # A plain view of the memmap: slicing np.memmap itself is three times as slow.
                self._arrays[name] = np.asarray(np.memmap(self.folder.path(name), dtype, mode="r"))
            else:
                self._arrays[name] = np.frombuffer(self.folder.read(name), dtype)
        return self._arrays[name]

    def _check_size(self, name: str, expected: int, sizes: Mapping[str, int]) -> None:
        remedy = "copy it again, or prepare the data again"
        if name not in sizes:
            raise UserError(f"{self.path}/{name} is missing; {remedy}")
        if sizes[name] != expected:
            problem = "truncated" if sizes[name] < expected else "too long"
            raise UserError(
                f"{self.path}/{name} is {problem}: it has {sizes[name]} bytes, but the manifest says {expected}; {remedy}"
            )


class ShardWriter:
    """Writes one shard. Its files have temporary names until `close`."""

    BUFFER = 2**20  # tokens

    def __init__(self, folder: Path, name: str, dtype: "npt.DTypeLike") -> None:
        self.name = name
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.num_tokens = self.num_documents = self.prompt_tokens = 0
        self._pending: list[npt.NDArray[Any]] = []
        self._num_pending = 0
        self._documents: list[int] = []  # end and first label of each document, in turn
        self._first_label: int | None = None  # of an unfinished document
        self._open = ExitStack()
        self._files = {
            kind: self._open.enter_context(atomic_writer(folder / f"{name}.{kind}")) for kind in ("tokens", "documents")
        }
        self._hashes = {kind: hashlib.sha256() for kind in self._files}

    def add(self, tokens: npt.NDArray[Any], prompt_tokens: int = 0, *, last: bool = True) -> None:
        """Appends a document, or with `last=False` a part of one. Its first `prompt_tokens` are excluded from the loss."""
        if self._first_label is None:
            self._first_label = self.num_tokens + prompt_tokens
        self._pending.append(tokens)
        self._num_pending += len(tokens)
        self.num_tokens += len(tokens)
        self.prompt_tokens += prompt_tokens
        if last:
            self._documents += [self.num_tokens, self._first_label]
            self._first_label = None
            self.num_documents += 1
        if self._num_pending >= self.BUFFER:
            self._flush()

    def close(self) -> Shard:
        """Renames the files and returns the shard's entry in the manifest."""
        assert self._first_label is None
        self._flush()
        self._open.close()
        tokens_sha256, documents_sha256 = (self._hashes[kind].hexdigest() for kind in ("tokens", "documents"))
        return Shard(
            self.name, self.num_tokens, self.num_documents, tokens_sha256, documents_sha256, self.prompt_tokens
        )

    def drop(self) -> None:
        """Deletes the unfinished files."""
        for file in self._files.values():
            with suppress(OSError):  # the disk may be full
                file.close()
            Path(file.name).unlink(missing_ok=True)

    def _flush(self) -> None:
        self._write("tokens", np.concatenate([*self._pending, np.empty(0, self.dtype)]).astype(self.dtype))
        self._write("documents", np.array(self._documents, "<i8"))
        self._pending, self._documents, self._num_pending = [], [], 0

    def _write(self, kind: str, values: npt.NDArray[Any]) -> None:
        content = values.tobytes()
        write_all(self._files[kind], content)
        self._hashes[kind].update(content)


def totals(shards: Sequence[Shard]) -> tuple[int, int]:
    """Returns the number of tokens and documents of shards."""
    return sum(shard.tokens for shard in shards), sum(shard.documents for shard in shards)
