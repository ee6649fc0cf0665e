"""Token shards: what `titanlike data prepare` writes and a run reads. No torch.

A folder with `manifest.json` and two files a shard, both plain numbers without a header, least byte first:
`train-00000.tokens`, uint16 or uint32, documents one after the other; and `train-00000.documents`, two int64 a document: the
place where it ends, and the first place from which its tokens are learnt (after a prompt, if it has one). Read wherever they
are: here by way of a memory map, at an address by asking for ranges.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from titanlike.config import UserError
from titanlike.data.text.files import DataDirectory

MANIFEST = "manifest.json"
FORMAT = 1
TRAIN, VALIDATION = "train", "validation"

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Shard:
    """What the manifest says of one."""

    name: str
    tokens: int
    documents: int
    tokens_sha256: str
    documents_sha256: str
    given: int = 0  # tokens that are not learnt


@dataclass(frozen=True)
class Manifest:
    """What a folder of shards says of itself."""

    dtype: str
    tokenizer: dict[str, Any]  # its fingerprint, and the recipe's section
    splits: dict[str, list[Shard]]
    source: dict[str, Any]  # for people: where it comes from, and how
    skipped: int = 0  # records that could not be read, and were left out as asked

    def write(self, folder: Path) -> None:
        """Write it: the last thing that is written of a folder."""
        partial = folder / f"{MANIFEST}.partial"
        with partial.open("w") as file:
            json.dump({"format": FORMAT} | asdict(self), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(folder / MANIFEST)

    @property
    def fingerprint(self) -> str:
        """Equal for folders with the same tokens in the same order."""
        hashes = [[shard.tokens_sha256, shard.documents_sha256] for shards in self.splits.values() for shard in shards]
        return hashlib.sha256(json.dumps([self.dtype, self.tokenizer["fingerprint"], hashes]).encode()).hexdigest()[:16]


def read_manifest(path: str, folder: DataDirectory | None = None) -> Manifest:
    """What the folder at a path or an address says of itself."""
    folder = folder or DataDirectory(path)
    try:
        values = json.loads(folder.read(MANIFEST))
    except FileNotFoundError:
        if folder.local and not folder.path("").exists():
            raise UserError(f"{path}: there is no such folder of token shards") from None
        raise UserError(
            f"{path} has no {MANIFEST}, so it is no folder of token shards; `titanlike data prepare` makes one of text"
        ) from None
    except OSError as error:
        raise UserError(f"{path}/{MANIFEST} cannot be read: {error}") from None
    except ValueError as error:
        raise UserError(f"{path}/{MANIFEST} is not JSON: {error}; prepare the data again") from None
    try:
        number = values.pop("format")
        if number != FORMAT:
            raise UserError(f"{path}/{MANIFEST} has format {number}, but this titanlike reads format {FORMAT}")
        splits = {name: [Shard(**shard) for shard in shards] for name, shards in values.pop("splits").items()}
        manifest = Manifest(splits=splits, **values)
        _ = np.dtype(manifest.dtype), manifest.tokenizer["fingerprint"]
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path}/{MANIFEST} is not a manifest of token shards ({error}); prepare the data again"
        ) from None
    return manifest


class Shards:
    """The tokens of one split, as if they stood in one row."""

    def __init__(self, path: str, split: str = TRAIN) -> None:
        self.path = path
        self.folder = DataDirectory(path)
        self.manifest = read_manifest(path, self.folder)
        self.split = split
        self.shards = self.manifest.splits.get(split, [])
        self.dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
        self.starts = np.cumsum([0] + [shard.tokens for shard in self.shards])
        self.has_given = any(shard.given for shard in self.shards)
        sizes = self.folder.sizes()
        for shard in self.shards:
            self._check_size(f"{shard.name}.tokens", shard.tokens * self.dtype.itemsize, sizes)
            self._check_size(f"{shard.name}.documents", shard.documents * 16, sizes)
        self._maps: dict[str, npt.NDArray[Any]] = {}

    @property
    def num_tokens(self) -> int:
        return int(self.starts[-1])

    @property
    def num_documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def fingerprint(self) -> str:
        return self.manifest.fingerprint

    def read(self, starts: Numbers, length: int) -> Numbers:
        """So many tokens from each of these places (N, length)."""
        found = np.empty((len(starts), length), np.int64)
        pieces = [piece for row, start in enumerate(starts.tolist()) for piece in self._pieces(row, start, length)]
        if self.folder.local:
            for row, column, shard, first, count in pieces:
                found[row, column : column + count] = self._map(f"{shard.name}.tokens", self.dtype)[
                    first : first + count
                ]
            return found
        width = self.dtype.itemsize
        ranges = [
            (f"{shard.name}.tokens", first * width, (first + count) * width) for _, _, shard, first, count in pieces
        ]
        for (row, column, _, _, count), content in zip(pieces, self.folder.ranges(ranges), strict=True):
            found[row, column : column + count] = np.frombuffer(content, self.dtype)
        return found

    def loss_mask(self, starts: Numbers, length: int) -> npt.NDArray[np.bool_] | None:
        """Which of these tokens are learnt (N, length); None if all are."""
        if not self.has_given:
            return None
        found = np.ones((len(starts), length), bool)
        for row, start in enumerate(starts.tolist()):
            for _, column, shard, first, count in self._pieces(row, start, length):
                ends, learnt_from = self._documents(shard).T
                for number in range(np.searchsorted(ends, first, side="right"), len(ends)):
                    begin = int(ends[number - 1]) if number else 0
                    if begin >= first + count:
                        break
                    given = slice(max(begin - first, 0) + column, max(int(learnt_from[number]) - first, 0) + column)
                    found[row, given.start : min(given.stop, column + count)] = False
        return found

    def lengths(self, shard: Shard) -> Numbers:
        """Tokens of each document of a shard (N,)."""
        return np.diff(self._documents(shard)[:, 0], prepend=0)

    def verify(self) -> None:
        """Read all of it, and raise `UserError` at the first file that is not what it was."""
        for shard in self.shards:
            for name, wanted in (
                (f"{shard.name}.tokens", shard.tokens_sha256),
                (f"{shard.name}.documents", shard.documents_sha256),
            ):
                if hashlib.sha256(self.folder.read(name)).hexdigest() != wanted:
                    raise UserError(
                        f"{self.path}/{name} is not what was written; copy it again, or prepare the data again"
                    )

    def _pieces(self, row: int, start: int, length: int) -> list[tuple[int, int, Shard, int, int]]:
        """Where `length` tokens from `start` lie: row and column of the result, shard, first place in it, and how many."""
        assert start >= 0 and start + length <= self.num_tokens
        pieces, column = [], 0
        number = int(np.searchsorted(self.starts, start, side="right")) - 1
        while column < length:
            first = start + column - int(self.starts[number])
            count = min(length - column, self.shards[number].tokens - first)
            if count:
                pieces.append((row, column, self.shards[number], first, count))
            column += count
            number += 1
        return pieces

    def _documents(self, shard: Shard) -> Numbers:
        return self._map(f"{shard.name}.documents", np.dtype("<i8")).reshape(-1, 2)

    def _map(self, name: str, dtype: "np.dtype[Any]") -> npt.NDArray[Any]:
        if name not in self._maps:
            if self.folder.local:
                # As a plain array: to take a part of one is three times as fast.
                self._maps[name] = np.asarray(np.memmap(self.folder.path(name), dtype, mode="r"))
            else:
                self._maps[name] = np.frombuffer(self.folder.read(name), dtype)
        return self._maps[name]

    def _check_size(self, name: str, wanted: int, sizes: Mapping[str, int] | None) -> None:
        if sizes is None:  # the place does not tell
            return
        if name not in sizes:
            raise UserError(f"{self.path}/{name} is missing; copy it again, or prepare the data again")
        if sizes[name] != wanted:
            what = "cut off" if sizes[name] < wanted else "too long"
            raise UserError(
                f"{self.path}/{name} is {what}: it has {sizes[name]} bytes, and the manifest says {wanted}; copy it again, or "
                "prepare the data again"
            )


class ShardWriter:
    """Writes one shard, under other names until it is closed."""

    BUFFER = 2**20  # tokens

    def __init__(self, folder: Path, name: str, dtype: "npt.DTypeLike") -> None:
        self.folder, self.name = folder, name
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.num_tokens = self.num_documents = self.given = 0
        self._waiting: list[npt.NDArray[Any]] = []
        self._ends: list[int] = []
        self._learnt_from: int | None = None  # of a document that goes on
        self._num_waiting = 0
        self._files = {kind: _Hashed(folder / f"{name}.{kind}") for kind in ("tokens", "documents")}

    def add(self, tokens: npt.NDArray[Any], given: int = 0, *, last: bool = True) -> None:
        """A document, of which the first tokens are given, and not learnt; or a piece of one that goes on, if not the last."""
        if self._learnt_from is None:
            self._learnt_from = self.num_tokens + given
        self._waiting.append(tokens.astype(self.dtype))
        self._num_waiting += len(tokens)
        self.num_tokens += len(tokens)
        self.given += given
        if last:
            self._ends += [self.num_tokens, self._learnt_from]
            self._learnt_from = None
            self.num_documents += 1
        if self._num_waiting >= self.BUFFER:
            self._flush()

    def close(self) -> Shard:
        """Put it on the disk, under its name."""
        assert self._learnt_from is None
        self._flush()
        sums = {kind: file.close() for kind, file in self._files.items()}
        return Shard(self.name, self.num_tokens, self.num_documents, sums["tokens"], sums["documents"], self.given)

    def drop(self) -> None:
        """Delete what was written."""
        for file in self._files.values():
            file.drop()

    def _flush(self) -> None:
        for tokens in self._waiting:
            self._files["tokens"].write(tokens)
        self._files["documents"].write(np.array(self._ends, "<i8"))
        self._waiting, self._ends, self._num_waiting = [], [], 0


class _Hashed:
    """A file that is hashed as it is written, and gets its name when it is whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.partial = path.with_name(f"{path.name}.partial")
        self.file: BinaryIO = self.partial.open("wb")
        self.sum = hashlib.sha256()

    def write(self, values: npt.NDArray[Any]) -> None:
        content = np.ascontiguousarray(values).data.cast("B")
        self.file.write(content)
        self.sum.update(content)

    def close(self) -> str:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        self.partial.replace(self.path)
        return self.sum.hexdigest()

    def drop(self) -> None:
        with suppress(OSError):  # a full disk, which may be why
            self.file.close()
        self.partial.unlink(missing_ok=True)


def totals(shards: Sequence[Shard]) -> tuple[int, int]:
    """Tokens and documents of shards."""
    return sum(shard.tokens for shard in shards), sum(shard.documents for shard in shards)
