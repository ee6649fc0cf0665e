"""Token files of other programs, which are read in place like token shards. No torch.

| Program | Files | Tokens | Documents |
|---|---|---|---|
| Megatron-LM | `NAME.bin` and `NAME.idx` | without a header, of the type that the index names | by the index |
| llm.c | `NAME.bin` | after a header of 256 int32: magic, version, number of tokens | each begins with a separator |
| nanoGPT | `NAME.bin` | uint16 without a header | each ends with a separator |
"""

import fnmatch
import hashlib
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from titanlike.config import UserError
from titanlike.config.base import record
from titanlike.data.documents.directory import DataDirectory
from titanlike.data.tokens.arrays import Numbers
from titanlike.data.tokens.shards import MANIFEST, TEST, TRAIN, VALIDATION, Manifest, Shard, Shards
from titanlike.data.tokens.tokenizer import Tokenizer

MEGATRON, LLM_C, NANOGPT = "Megatron-LM", "llm.c", "nanoGPT"
COPY = "copy it again"

INDEX = struct.Struct("<9sQBQQ")  # magic, version, code of the type, sequences, and entries of the document index
INDEX_MAGIC = b"MMIDIDX\0\0"
TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}

LLM_C_HEADER = 1024  # bytes
LLM_C_TYPES = {(20240520, 1): "uint16", (20240801, 7): "uint32"}  # by magic and version: tokens of GPT-2 and of Llama 3
LLM_C_MAGICS = range(20240500, 20241000)

CHECKED_ENTRIES, MAX_CHECKS = 2**13, 128  # of an index: entries of a block, and blocks, that are checked before a run
SAMPLE, MIN_SAMPLE = 64, 8  # documents whose separators are checked, and those that suffice to know another separator
SCAN = 2**22  # tokens in which a separator is looked for, and that are read at a time to find documents


@record
class TokenFile(Shard):
    """A file of tokens. `documents` is 0 if they have to be looked for."""

    name: str  # of the file
    program: str = ""
    header: int = 0  # bytes before the tokens
    sequences: int = 0  # of the index
    entries: int = 0  # of the document index, one more than there are documents

    @property
    def index(self) -> str:
        return f"{self.name.removesuffix('.bin')}.idx"


@record
class TokenFilesManifest(Manifest):
    """A manifest that is derived from token files."""

    dtype: Literal["uint8", "int8", "int16", "int32", "int64", "uint16", "uint32"]  # type: ignore[assignment]


class Location(NamedTuple):
    """Token files in a folder."""

    folder: DataDirectory
    names: list[str]
    sizes: dict[str, int]  # of all files in the folder


def open_shards(path: str, split: str = TRAIN, *, tokenizer: Tokenizer | None = None) -> Shards:
    """Opens a folder of token shards, or token files of another program."""
    if location := find_token_files(path):
        return TokenFiles(location, path, split, tokenizer=tokenizer)
    return Shards(path, split, tokenizer=tokenizer)


def find_token_files(path: str) -> Location | None:
    """Returns the token files that a path names: one, with or without `.bin`, or all of a pattern such as `train_*.bin` or of a
    folder. None if there are none, or if the folder has token shards."""
    parent, slash, name = path.rstrip("/").rpartition("/")
    stem = re.sub(r"\.(bin|idx)$", "", name)
    places = [(parent or slash or ".", f"{stem}.bin", True)]
    if stem == name:
        places.insert(0, (path, "*.bin", False))
    for place, pattern, by_name in places:
        folder = DataDirectory(place)
        if folder.local and not folder.path("").is_dir():
            continue
        sizes = folder.sizes() or {}
        names = [pattern] if pattern in sizes else fnmatch.filter(sizes, pattern)
        if not by_name and (MANIFEST in sizes or not names):
            continue
        if not names and f"{stem}.idx" in sizes:
            raise UserError(f"{place}/{pattern} is missing; copy it beside its index {stem}.idx")
        if names:
            return Location(folder, sorted(name for name in names if not name.startswith(".")), sizes)
    return None


def is_token_file(path: str) -> bool:
    """Whether a path that may name text names token files: by the suffix, or as the prefix of Megatron-LM's two files."""
    return path.endswith((".bin", ".idx")) or ("://" not in path and Path(f"{path}.idx").is_file())


class TokenFiles(Shards):
    """The tokens of one split of token files as a single array. Files of a folder or pattern whose names have the word `val` or
    `test` are these splits, unless there are no others."""

    remedy = "copy it again, or set tokenizer.encoding to the tokenizer that made it"

    def __init__(
        self, location: Location, path: str, split: str = TRAIN, *, tokenizer: Tokenizer | None = None
    ) -> None:
        self.location = location
        super().__init__(path, split, tokenizer=tokenizer)

    def _open(self, path: str) -> tuple[DataDirectory, Manifest]:
        folder, names, _ = self.location
        found = {name: self._inspect(folder, name) for name in names}
        [first, *others] = found
        for other in others:
            if found[other][0] != found[first][0]:
                kinds = " and ".join(f"{name} has {found[name][0]}" for name in (first, other))
                raise UserError(f"{path}: its files have tokens of different types: {kinds}; use data.mixture")
        splits: dict[str, list[Shard]] = {TRAIN: []}
        for name, (_, file) in found.items():
            splits.setdefault(_split_of(name), []).append(file)
        if not splits[TRAIN]:
            splits = {TRAIN: [file for _, file in found.values()]}
        programs = ", ".join(sorted({file.program for _, file in found.values()}))
        dtype: Any = found[first][0]
        return folder, TokenFilesManifest(dtype, {"fingerprint": ""}, splits, {"program": programs})

    def _check_files(self) -> None:
        """Does nothing: the sizes were compared with the headers."""

    def _range_of(self, shard: Shard, start: int, stop: int) -> tuple[str, int, int]:
        assert isinstance(shard, TokenFile)
        width = self.dtype.itemsize
        return shard.name, shard.header + start * width, shard.header + stop * width

    def _sample_documents(self) -> Iterator[bytes]:
        yield from ()  # the hashes in the manifest cover the index

    def verify(self) -> None:
        raise UserError(f"--verify: {self.path} has no hashes; only token shards of `titanlike data prepare` have them")

    def check_tokenizer(self, tokenizer: Tokenizer) -> str:
        """Refuses files that another tokenizer has made, as far as their separators show it. Returns a warning if documents have
        none, else ""."""
        if any(isinstance(shard, TokenFile) and shard.program == NANOGPT for shard in self.shards):
            if "meta.pkl" in self.location.sizes:
                raise UserError(
                    f"{self.folder.location}/meta.pkl: nanoGPT's tokens beside it are characters, numbered as it says; train on "
                    "its text with data.source = 'text', or remove meta.pkl if tokenizer.encoding has the same numbers"
                )
            if tokenizer.vocab_size > 2**16:
                raise UserError(
                    f"{self.path}: tokens without a header are read as uint16, but tokenizer.encoding has {tokenizer.vocab_size:,} "
                    "tokens; set tokenizer.encoding to the one that made the file"
                )
        token, closes = tokenizer.separator.token, tokenizer.separator.closes
        role, opposite_role = ("eos", "bos") if closes else ("bos", "eos")
        side, opposite_side = ("end", "begin") if closes else ("begin", "end")
        first, last = self._ends_of_documents()
        found, opposite = (last, first) if closes else (first, last)
        if len(found) and not (found == token).any():
            if (opposite == token).all():
                raise UserError(
                    f"{self.path}: documents {opposite_side} with token {token}, which tokenizer.special = "
                    f"{tokenizer.section.special!r} takes for their {side}; set tokenizer.special = {opposite_role!r}, and "
                    f"tokenizer.{opposite_role} to the name of that token"
                )
            if len(found) >= MIN_SAMPLE and (found == found[0]).all() and self._is_separator(found[0]):
                raise UserError(
                    f"{self.path}: documents {side} with token {found[0]}, but tokenizer.{role} is token {token}; set "
                    f"tokenizer.{role} to the name of that token, or tokenizer.encoding to the tokenizer that made the file"
                )
        if self.num_documents:
            count, looked_at = int((found == token).sum()), f"{len(found)} documents looked at {side} with"
        else:
            looked_at = f"{min(self.num_tokens, SCAN):,} tokens looked at are"
            count = int((self.read(np.array([0]), min(self.num_tokens, SCAN)) == token).sum())
        if count >= (len(found) if self.num_documents else 1):
            return ""
        return f"{count} of the {looked_at} token {token} (tokenizer.{role}), by which data.document_masks separates documents"

    def _ends_of_documents(self) -> tuple[Numbers, Numbers]:
        """Returns the first and the last tokens of the first documents of an index. Of a file without one, returns its first and
        its last token: a file may begin or end within a document."""
        if not self.shards:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        file = self.shards[0]
        assert isinstance(file, TokenFile)
        rows = self._boundaries(file, SAMPLE) if file.program == MEGATRON else np.array([[0, file.tokens]])
        rows = rows[rows[:, 1] > rows[:, 0]]
        ones = np.ones(len(rows), np.int64)
        first, last = self.read_pieces(rows[:, 0], ones), self.read_pieces(rows[:, 1] - 1, ones)
        return first, last

    def _is_separator(self, token: int) -> bool:
        """Whether the first documents of an index have a token once each. A newline may end all of them, but is within them too."""
        file = self.shards[0]
        assert isinstance(file, TokenFile)
        rows = self._boundaries(file, SAMPLE)
        tokens = self.read(rows[:1, 0], min(int(rows[-1, 1] - rows[0, 0]), SCAN))
        return int((tokens == token).sum()) <= len(rows)

    def _read_documents(self, shard: Shard) -> Numbers:
        assert isinstance(shard, TokenFile)
        if shard.name not in self._documents:
            rows = self._boundaries(shard) if shard.program == MEGATRON else self._scan(shard)
            rows = rows[rows[:, 1] > rows[:, 0]]  # empty documents have no tokens to read
            self._documents[shard.name] = rows[:, ::-1]  # end and first label
        return self._documents[shard.name]

    def _boundaries(self, file: TokenFile, limit: int | None = None) -> Numbers:
        """Returns the start and the end of the first documents of an index (N, 2)."""
        count = min(file.entries, (limit or file.entries) + 1)
        documents = self._index_part(file, "documents", 0, count)
        first_sequence, last_sequence = int(documents[0]), int(documents[-1])
        pointers = self._index_part(file, "pointers", first_sequence, min(last_sequence + 1, file.sequences))
        offsets = np.append(pointers // self.dtype.itemsize, file.tokens)
        bounds = offsets[documents - first_sequence]
        return np.stack([bounds[:-1], bounds[1:]], 1)

    def _index_part(self, file: TokenFile, part: str, first: int, stop: int) -> Numbers:
        return _read_index(self.folder, file.index, file.sequences, part, first, stop)

    def _scan(self, file: TokenFile) -> Numbers:
        """Returns the start and the end of each document between separators (N, 2)."""
        if self.tokenizer is None:
            return np.empty((0, 2), np.int64)
        separator = self.tokenizer.separator
        base = int(self.offsets[self.shards.index(file)])
        found = [
            start
            + np.flatnonzero(self.read(np.array([base + start]), min(SCAN, file.tokens - start))[0] == separator.token)
            for start in range(0, file.tokens, SCAN)
        ]
        cuts = np.concatenate([np.empty(0, np.int64), *found]) + separator.closes
        bounds = np.unique(np.concatenate([[0], cuts, [file.tokens]]))
        return np.stack([bounds[:-1], bounds[1:]], 1)

    def _inspect(self, folder: DataDirectory, name: str) -> tuple[str, TokenFile]:
        """Returns the type of the tokens of a file, and its description."""
        sizes = self.location.sizes
        if f"{name.removesuffix('.bin')}.idx" in sizes:
            return self._inspect_megatron(folder, name)
        [start] = folder.ranges([(name, 0, min(sizes[name], LLM_C_HEADER))])
        header = np.frombuffer(start[: len(start) // 4 * 4], "<i4").tolist()
        if not start:
            raise UserError(f"{folder.location}/{name} is empty; {COPY}")
        if (header and header[0] in LLM_C_MAGICS) or (len(header) == LLM_C_HEADER // 4 and not any(header[3:])):
            return self._inspect_llm_c(folder, name, header)
        values = np.frombuffer(start[: len(start) // 4 * 4], "<u2")
        if len(values) >= 32 and values[::2].any() and not values[1::2].any():
            raise UserError(
                f"{folder.location}/{name}: every second of its first {len(values)} tokens is 0 if they are read as uint16, as "
                "without a header; copy the index of Megatron-LM (.idx) beside it if it has one"
            )
        if sizes[name] % 2:
            raise UserError(
                f"{folder.location}/{name} is truncated: it has {sizes[name]} bytes, but each token (uint16) takes 2; {COPY}"
            )
        return "uint16", self._described(name, NANOGPT, sizes[name] // 2, b"")

    def _inspect_llm_c(self, folder: DataDirectory, name: str, header: list[int]) -> tuple[str, TokenFile]:
        where, size = f"{folder.location}/{name}", self.location.sizes[name]
        dtype = LLM_C_TYPES.get((header[0], header[1] if len(header) > 1 else 0))
        if size < LLM_C_HEADER:
            raise UserError(
                f"{where} is truncated: it has {size} bytes, and llm.c's header alone has {LLM_C_HEADER}; {COPY}"
            )
        if dtype is None:
            known = " or ".join(f"{magic} and {version}" for magic, version in LLM_C_TYPES)
            raise UserError(
                f"{where}: the magic number and version of its header are {header[0]} and {header[1]}, but llm.c's tokens have "
                f"{known}; {COPY}"
            )
        expected = LLM_C_HEADER + header[2] * np.dtype(dtype).itemsize
        self._check_size_of(where, size, expected, f"its header says {header[2]:,} tokens, which take")
        return dtype, self._described(name, LLM_C, header[2], b"", header=LLM_C_HEADER)

    def _inspect_megatron(self, folder: DataDirectory, name: str) -> tuple[str, TokenFile]:
        sizes, index = self.location.sizes, f"{name.removesuffix('.bin')}.idx"
        where = f"{folder.location}/{index}"
        [start] = folder.ranges([(index, 0, min(sizes[index], INDEX.size))])
        if len(start) < INDEX.size or not start.startswith(INDEX_MAGIC):
            raise UserError(
                f"{where} is not an index of Megatron-LM: it begins with {start[:9]!r}, not {INDEX_MAGIC!r}; {COPY}"
            )
        _, version, code, sequences, entries = INDEX.unpack(start)
        if version != 1 or code not in TYPES:
            known = ", ".join(f"{number} ({kind})" for number, kind in TYPES.items())
            raise UserError(
                f"{where}: its version is {version} and its code of the type {code}; read are version 1 and {known}; {COPY}"
            )
        dtype = np.dtype(TYPES[code])
        expected = INDEX.size + 12 * sequences + 8 * entries
        if sequences and sizes[index] == expected + sequences:
            raise UserError(f"{where} is the index of a multimodal dataset, which is not read; give one of text")
        what = f"its header says {sequences:,} sequences and {entries:,} document boundaries, which take"
        self._check_size_of(where, sizes[index], expected, what)
        if not sequences:
            raise UserError(f"{where} has no sequences; prepare the data again")

        def part(kind: str, first: int, stop: int) -> Numbers:
            return _read_index(folder, index, sequences, kind, first, stop)

        digest = hashlib.sha256(start)
        stop = end = 0
        for first in _blocks(sequences):
            follows, stop = first == stop, min(first + CHECKED_ENTRIES, sequences)
            lengths, pointers = part("lengths", first, stop), part("pointers", first, stop)
            starts = (end if follows else pointers[0]) + np.append(0, np.cumsum(lengths * dtype.itemsize))
            [wrong] = np.nonzero((pointers != starts[:-1]) | (lengths < 0))
            if len(wrong):
                at = int(wrong[0])
                raise UserError(
                    f"{where}: sequence {first + at} has {lengths[at]} tokens from byte {pointers[at]} on, but the one before it "
                    f"ends at byte {starts[at]}; {COPY}"
                )
            end = int(starts[-1])
            digest.update(lengths.tobytes())
        for first in _blocks(entries):
            documents = part("documents", first, min(first + CHECKED_ENTRIES + 1, entries))
            [wrong] = np.nonzero((np.diff(documents) < 0) | (documents[1:] > sequences))
            if len(wrong) or (not first and documents[0] != 0):
                at = int(wrong[0]) + 1 if len(wrong) else 0
                raise UserError(
                    f"{where}: document boundary {first + at} is sequence {documents[at]}, which is not between the one before it "
                    f"and the {sequences} sequences; {COPY}"
                )
            digest.update(documents.tobytes())
        if not entries or part("documents", entries - 1, entries)[0] != sequences:
            raise UserError(f"{where}: its last document does not end with its last sequence; {COPY}")
        data, what = f"{folder.location}/{name}", f"its index {index} says {end // dtype.itemsize:,} tokens, which take"
        self._check_size_of(data, sizes[name], end, what)
        tokens, documents_sha256 = end // dtype.itemsize, digest.digest()
        file = self._described(name, MEGATRON, tokens, documents_sha256, sequences=sequences, entries=entries)
        return dtype.name, file

    def _described(self, name: str, program: str, tokens: int, digest: bytes, **fields: int) -> TokenFile:
        num_documents = max(fields.get("entries", 0) - 1, 0)
        # Tokens are not hashed: a fingerprint has samples of them.
        return TokenFile(name, tokens, num_documents, f"{tokens} tokens", digest.hex(), program=program, **fields)

    def _check_size_of(self, where: str, size: int, expected: int, what: str) -> None:
        if size != expected:
            problem = "truncated" if size < expected else "too long"
            raise UserError(f"{where} is {problem}: it has {size} bytes, but {what} {expected}; {COPY}")


def _blocks(count: int) -> Sequence[int]:
    """Returns where the blocks of an index begin that are checked: all of a small one, and some of a large one."""
    if count <= CHECKED_ENTRIES * MAX_CHECKS:
        return range(0, count, CHECKED_ENTRIES)
    starts: list[int] = np.linspace(0, count - CHECKED_ENTRIES, MAX_CHECKS).astype(np.int64).tolist()
    return starts


def _read_index(folder: DataDirectory, index: str, sequences: int, part: str, first: int, stop: int) -> Numbers:
    """Returns entries of one of the arrays of an index: `lengths` and byte `pointers` of sequences, and numbers of the first
    sequences of `documents`."""
    offset = INDEX.size + {"lengths": 0, "pointers": 4, "documents": 12}[part] * sequences
    dtype = np.dtype("<i4" if part == "lengths" else "<i8")
    [content] = folder.ranges([(index, offset + first * dtype.itemsize, offset + stop * dtype.itemsize)])
    return np.frombuffer(content, dtype).astype(np.int64)


def _split_of(name: str) -> str:
    words = re.split(r"[^a-z]+", name.lower())
    if not {"val", "valid", "validation"}.isdisjoint(words):
        return VALIDATION
    return TEST if "test" in words else TRAIN
