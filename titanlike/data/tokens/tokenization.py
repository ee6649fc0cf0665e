"""Tokenizes text into token shards. No torch.

Training does this once for text that has no shards yet; `titanlike data prepare` does it in several processes.
"""

import hashlib
import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from titanlike.config import UserError
from titanlike.config.sections import Tokenizer as Section
from titanlike.data.documents.data_files import File, convert_write_errors, is_address
from titanlike.data.documents.readers import BadRecord, Document, Fields, OnBadRecord, read_chunks
from titanlike.data.tokens.shard_writer import ShardWriter
from titanlike.data.tokens.shards import TEST, TRAIN, VALIDATION, Manifest, Shard
from titanlike.data.tokens.tokenizer import TokenIDs, Tokenizer, files_of
from titanlike.utils.atomic_write import atomic_write_text, fsync_directory

BATCH = 2**18  # characters that are encoded at once
MAX_EXAMPLES = 5  # bad records whose error messages are kept

ReportProgress = Callable[[int, int], None]  # receives numbers of bytes read and tokens made
ReadSpan = Callable[["FileSpan", OnBadRecord | None], Iterator[Document]]


@dataclass(frozen=True)
class FileSpan:
    """A file, or a range of it."""

    file: File
    size: int  # bytes, estimated for Parquet
    bounds: tuple[int, int] | None = (
        None  # byte offsets of JSON lines, or row groups of Parquet; None: the complete file
    )


@dataclass(frozen=True)
class WorkUnit:
    """The input of one shard per split."""

    number: int
    spans: tuple[FileSpan, ...]

    @property
    def size(self) -> int:
        return sum(span.size for span in self.spans)


@dataclass(frozen=True)
class Options:
    """Options that apply to all work units."""

    folder: Path
    tokenizer: Section
    fields: Fields
    validation_share: float
    skip_bad_records: bool
    test_share: float = 0.0


@dataclass
class WorkUnitResult:
    """The shards and statistics of a finished work unit."""

    unit: int
    splits: dict[str, Shard] = field(default_factory=dict)
    text_bytes: int = 0
    empty: int = 0  # documents without text
    skipped: int = 0  # bad records
    examples: list[str] = field(default_factory=list)  # error messages of the first bad records
    hashes: "array[int] | None" = None  # of the documents, by which copies are counted


def tokenize(
    unit: WorkUnit, options: Options, tokenizer: Tokenizer, report: ReportProgress, read_span: ReadSpan | None = None
) -> WorkUnitResult:
    """Tokenizes a work unit into one shard per split. `read_span` yields its documents in chunks: by default, all of them."""
    writers: dict[str, ShardWriter] = {}
    hashes = array("Q")
    result = WorkUnitResult(unit.number, hashes=hashes)

    def read_all(span: FileSpan, bad: OnBadRecord | None) -> Iterator[Document]:
        return read_chunks(span.file, options.fields, span=span.bounds, bad=bad)

    def skip(problem: BadRecord) -> None:
        result.skipped += 1
        if len(result.examples) < MAX_EXAMPLES:
            result.examples.append(str(problem))

    def add(span: FileSpan) -> None:
        first, split, unread, before = True, TRAIN, span.size, b""
        on_bad_record = skip if options.skip_bad_records else None
        for chunk, encoded in _encode((read_span or read_all)(span, on_bad_record), tokenizer):
            if not chunk.text and first and chunk.last:
                result.empty += 1
                continue
            content = chunk.text.encode()
            digest = _digest(content)
            if first:
                split = split_of(digest, options.validation_share, options.test_share)
                digest = _digest(_digest(chunk.prompt.encode()) + digest) if chunk.prompt else digest
            else:
                digest = _digest(before + digest)
            before = digest
            if chunk.last:
                hashes.append(int.from_bytes(digest, "little"))
            if split not in writers:
                writers[split] = ShardWriter(options.folder, f"{split}-{unit.number:05d}", tokenizer.dtype)
            tokens, prompt_length = tokenizer.document(encoded, chunk.prompt, first=first, last=chunk.last)
            writers[split].add(tokens, prompt_length, last=chunk.last)
            result.text_bytes += len(content)
            first = chunk.last
            read = min(chunk.size, unread)
            unread -= read
            report(read, len(tokens))
        check_unchanged(span.file)
        report(unread, 0)

    tokenizer.codec.begin_input()
    with convert_write_errors(options.folder):
        try:
            for span in unit.spans:
                add(span)
            result.splits = {split: writer.close() for split, writer in writers.items()}
        except BaseException:
            for writer in writers.values():
                writer.drop()
            raise
    return result


def _encode(chunks: Iterable[Document], tokenizer: Tokenizer) -> Iterator[tuple[Document, TokenIDs]]:
    """Yields chunks of documents with their tokens. About `BATCH` characters are encoded at once."""
    batch, size = list[Document](), 0
    for chunk in chunks:
        batch.append(chunk)
        size += len(chunk.text) + 1
        if size >= BATCH:
            yield from zip(batch, tokenizer.codec.encode_batch([each.text for each in batch]), strict=True)
            batch, size = [], 0
    yield from zip(batch, tokenizer.codec.encode_batch([each.text for each in batch]), strict=True)


def split_of(digest: bytes, validation_share: float, test_share: float = 0.0) -> str:
    """Returns the split of a document, whose text (of a long document, its first chunk) has this digest. So copies agree."""
    value = int.from_bytes(digest, "little")
    if value < validation_share * 2**64:
        return VALIDATION
    return TEST if value >= 2**64 - test_share * 2**64 else TRAIN


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=8).digest()


def check_unchanged(file: File) -> None:
    """Raises if a file is not as it was listed."""
    if is_address(file.name):
        return
    stat = Path(file.name).stat() if Path(file.name).exists() else None
    if stat is None or (stat.st_size, str(stat.st_mtime_ns)) != (file.size, file.version):
        raise UserError(f"{file.name}: changed while it was read; run the command again when the file is complete")


def finish(
    partial: Path,
    out: Path,
    results: Sequence[WorkUnitResult],
    tokenizer: Tokenizer,
    options: Options,
    files: Sequence[File],
) -> Manifest:
    """Writes the manifest and renames the folder."""
    shares = {VALIDATION: options.validation_share, TEST: options.test_share}
    names = [TRAIN, *(split for split, share in shares.items() if share)]
    splits = {split: [result.splits[split] for result in results if split in result.splits] for split in names}
    empty, skipped = sum(result.empty for result in results), sum(result.skipped for result in results)
    if not splits[TRAIN]:
        shutil.rmtree(partial)  # nothing to resume
        if any(splits.values()):
            given = " and ".join(f"--{split} = {shares[split]}" for split in names[1:])
            raise UserError(f"{given} leave{'s' * (len(names) == 2)} no document for training; give a smaller fraction")
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        raise UserError(f"{files[0].name}{more}: no documents: {empty} without text, {skipped} bad records")
    section = tokenizer.section
    tokenizer_files = files_of(section.encoding)
    for file in tokenizer_files:
        atomic_write_text(partial / file.name, file.read_bytes())
    about: dict[str, Any] = {
        "fingerprint": tokenizer.fingerprint, **asdict(section), "vocab_size": tokenizer.codec.vocab_size,
    }  # fmt: skip
    source = {
        "files": len(files),
        "first": files[0].name,
        "bytes": sum(file.size for file in files),
        "text_bytes": sum(result.text_bytes for result in results),
        "text_field": options.fields.text,
        "prompt_field": options.fields.prompt,
        "validation": options.validation_share,
        **({"test": options.test_share} if options.test_share else {}),
        "tokenizer_file": tokenizer_files[0].name if tokenizer_files else "",
        "empty": empty,
        "skipped": [example for result in results for example in result.examples][:MAX_EXAMPLES],
    }
    manifest = Manifest(np.dtype(tokenizer.dtype).name, about, splits, source, skipped)
    manifest.write(partial)
    fsync_directory(partial)
    partial.replace(out)
    fsync_directory(out.parent)
    return manifest
