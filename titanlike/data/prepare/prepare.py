"""Raw text into a folder of token shards, side by side on all cores, to be gone on with wherever it was killed. No torch.

All is written into `OUT.partial`: first `plan.json`, with the input and how it is cut into units, then the shards of each unit
and after them `unit-00012.json`, at the end the manifest. Then the folder gets its name.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from titanlike.config import UserError
from titanlike.config.sections import Tokenizer as Section
from titanlike.data.prepare.work_units import (
    SHOWN,
    FileSpan,
    Options,
    WorkUnit,
    WorkUnitResult,
    make,
    split_work_units,
    sync,
    write_whole,
    writing,
)
from titanlike.data.prepare.workers import TICK, Workers
from titanlike.data.text.documents import LINES, PARQUET, Fields
from titanlike.data.text.files import File, list_files
from titanlike.data.text.tokenizer import Tokenizer, build_tokenizer, files_of
from titanlike.data.token_shards import MANIFEST, TRAIN, VALIDATION, Manifest, read_manifest
from titanlike.utils import system
from titanlike.utils.file_lock import FileLock, LockHeld

PLAN = "plan.json"
FORMAT = 1
BYTES = 258  # tokens of a vocabulary of bytes alone
LONGEST_TOKEN = 16  # bytes; a text has no fewer tokens than this says, about


@dataclass(frozen=True)
class Progress:
    """How far it is."""

    done: int  # bytes read
    total: int
    before: int  # of those read, by earlier starts
    tokens: int  # made by this start
    seconds: float  # since this start
    complete: bool = False  # by an earlier start: there was nothing to do


def prepare(
    inputs: Sequence[str | File],
    out: Path,
    tokenizer: Section,
    *,
    fields: Fields | None = None,
    validation_share: float = 0.0,
    workers: int | None = None,
    bad: Literal["stop", "skip"] = "stop",
    tell: Callable[[Progress], None] = lambda progress: None,
) -> Manifest:
    """Make a folder of token shards of files, folders, patterns or addresses. `workers` is the number of processes: one a
    core if it is None, and 0 does it all in this one. `tell` is called a few times a second. Raises `UserError`, after which the
    same call goes on where it was."""
    if not 0.0 <= validation_share < 1.0:
        raise UserError(f"--validation = {validation_share}: give a share of the documents, from 0 to below 1")
    built = build_tokenizer(tokenizer)
    fields = fields or Fields()
    with _alone(out), writing(out):
        files = _files(inputs, out)
        facts = _facts(files, built, fields, validation_share)
        if (out / MANIFEST).exists():
            _refuse_others(out, facts)
            _tidy(out)
            tell(Progress(0, 0, 0, 0, 0.0, complete=True))
            return read_manifest(str(out))
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"{out} is there already, and is no folder of token shards; give another --out")
        partial = partial_of(out)
        units = _plan(partial, files, facts)
        options = Options(partial, tokenizer, fields, validation_share, bad == "skip")
        done = _make_all(units, options, built, workers, tell)
        return _finish(partial, out, done, built, facts)


def partial_of(out: Path) -> Path:
    """Where a folder is, until it is whole."""
    return out.with_name(f"{out.name}.partial")


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Keep other processes from the same folder."""
    if not out.name:
        raise UserError(f"--out = {str(out)!r} is no name for a new folder")
    try:
        lock = FileLock(out.with_name(f".{out.name}.lock"))
    except LockHeld as holder:
        raise UserError(f"{out} is being prepared by {holder}; wait for that one, or give another --out") from None
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error}") from None
    try:
        yield
    finally:
        lock.path.unlink(missing_ok=True)
        lock.release()


def _files(inputs: Sequence[str | File], out: Path) -> list[File]:
    """The files of all inputs, without those that we make."""
    found = [file for place in inputs for file in ([place] if isinstance(place, File) else list_files(place, "INPUT"))]
    ours = [folder.resolve() for folder in (out, partial_of(out))]
    found = [file for file in found if not any(folder in Path(file.name).resolve().parents for folder in ours)]
    if not found:
        raise UserError("there is no file to read")
    return found


def _facts(files: Sequence[File], tokenizer: Tokenizer, fields: Fields, validation_share: float) -> dict[str, Any]:
    """All that the result depends on."""
    return {
        "format": FORMAT,
        "tokenizer": tokenizer.fingerprint,
        "text_field": fields.text,
        "prompt_field": fields.prompt,
        "validation": validation_share,
        "files": [[file.name, file.size, file.version] for file in files],
    }


def _plan(partial: Path, files: Sequence[File], facts: dict[str, Any]) -> list[WorkUnit]:
    """The units: those of an earlier start if there was one, else new ones."""
    if (partial / PLAN).exists():
        if not any(partial.glob("unit-*.json")):  # nothing is lost
            shutil.rmtree(partial)
        else:
            _refuse_others(partial, facts)
            return [
                WorkUnit(
                    number,
                    tuple(FileSpan(files[index], size, span and (span[0], span[1])) for index, size, span in parts),
                )
                for number, parts in enumerate(json.loads((partial / PLAN).read_text())["units"])
            ]
    units = split_work_units(files)
    places = {id(file): index for index, file in enumerate(files)}
    cut = [[[places[id(part.file)], part.size, part.span] for part in unit.parts] for unit in units]
    partial.mkdir(parents=True, exist_ok=True)
    write_whole(partial / PLAN, json.dumps({**facts, "units": cut}))
    sync(partial)
    return units


def _refuse_others(folder: Path, facts: dict[str, Any]) -> None:
    """Refuse what was made, or begun, of something else."""
    try:
        there = json.loads((folder / PLAN).read_text())
        what = [_difference(key, there[key], facts[key]) for key in facts if there[key] != facts[key]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = [f"its {PLAN} cannot be read ({type(error).__name__}: {error})"]
    if what:
        raise UserError(
            f"{folder} was {'begun' if folder.suffix == '.partial' else 'prepared'} otherwise: {'; '.join(what)}; remove that "
            "folder, or give another --out"
        )


def _difference(key: str, there: Any, here: Any) -> str:
    if key == "tokenizer":
        return "the tokenizer is another"
    if key != "files":
        return f"--{key.replace('_', '-')} was {there!r} and is {here!r}"
    before, now = ({name: rest for name, *rest in files} for files in (there, here))
    for name in [*before, *now]:
        if name not in now:
            return f"{name} was among its files and is not now"
        if name not in before:
            return f"{name} was not among its files and is now"
        if before[name] != now[name]:
            return f"{name} has changed since"
    return "its files were in another order"


def _make_all(
    units: Sequence[WorkUnit],
    options: Options,
    tokenizer: Tokenizer,
    workers: int | None,
    tell: Callable[[Progress], None],
) -> list[WorkUnitResult]:
    """What has become of all units, in their order."""
    width = np.dtype(tokenizer.dtype).itemsize
    found = {unit.number: WorkUnitResult.read(options.folder, unit.number, width) for unit in units}
    left = [unit for unit in units if found[unit.number] is None]
    meter = _Meter(sum(unit.size for unit in units), sum(unit.size for unit in units if found[unit.number]), tell)
    _check_room(options.folder, left, tokenizer)
    count = system.num_cores() if workers is None else workers
    try:
        if not count or len(left) < 2:
            for unit in left:
                found[unit.number] = make(unit, options, tokenizer, meter.add)
        else:
            with Workers(min(count, len(left)), options) as crew:
                for done in crew.results(left):
                    if done is not None:
                        found[done.unit] = done
                    meter.show(*crew.counts)
                meter.show(*crew.counts)
    finally:
        for path in options.folder.glob("*.partial"):  # of those that were killed
            path.unlink()
    meter.tell()
    return [done for done in found.values() if done is not None]


class _Meter:
    """Tells how far it is, not too often."""

    def __init__(self, total: int, before: int, tell: Callable[[Progress], None]) -> None:
        self.total, self.before, self._tell = total, before, tell
        self.started = self.told = time.monotonic()
        self.read = self.tokens = 0

    def add(self, read: int, tokens: int) -> None:
        self.show(self.read + read, self.tokens + tokens)

    def show(self, read: int, tokens: int) -> None:
        self.read, self.tokens = read, tokens
        if time.monotonic() - self.told >= TICK:
            self.tell()

    def tell(self) -> None:
        self.told = time.monotonic()
        seconds = self.told - self.started
        self._tell(Progress(self.before + self.read, self.total, self.before, self.tokens, seconds))


def _check_room(folder: Path, units: Sequence[WorkUnit], tokenizer: Tokenizer) -> None:
    """Refuse what cannot fit: even if each token were a long one, and most of a record no text."""
    longest = 1 if tokenizer.vocab_size <= BYTES else LONGEST_TOKEN
    text = sum(part.size if _is_plain(part) else part.size // 4 for unit in units for part in unit.parts)
    least, free = text // longest * np.dtype(tokenizer.dtype).itemsize, shutil.disk_usage(folder).free
    if least > free:
        raise UserError(
            f"{folder}: this text makes at least about {least:,} bytes of tokens, and its disk has {free:,} free; give --out "
            "on another"
        )


def _is_plain(part: FileSpan) -> bool:
    return part.file.compressed or part.file.kind not in (PARQUET, *LINES)


def _finish(
    partial: Path, out: Path, done: Sequence[WorkUnitResult], tokenizer: Tokenizer, facts: dict[str, Any]
) -> Manifest:
    """Write what the folder says of itself, and let it be there under its name."""
    kept = [TRAIN, VALIDATION] if facts["validation"] else [TRAIN]
    splits = {split: [unit.splits[split] for unit in done if split in unit.splits] for split in kept}
    empty, skipped = sum(unit.empty for unit in done), sum(unit.skipped for unit in done)
    left_out = f"{empty} had no text, and {skipped} could not be read"
    if not splits[TRAIN]:
        shutil.rmtree(partial)  # nobody would go on with it
    if not any(splits.values()):
        raise UserError(f"{_named(facts['files'])}: there is no document in it: {left_out}")
    if not splits[TRAIN]:
        raise UserError(f"--validation = {facts['validation']} leaves no document to train on; give a smaller share")
    section, files = tokenizer.section, files_of(tokenizer.section.encoding)
    for file in files:
        shutil.copyfile(file, partial / file.name)
    about = {"fingerprint": tokenizer.fingerprint, **asdict(section), "vocab_size": tokenizer.vocab_size}
    source = {
        "files": len(facts["files"]),
        "first": facts["files"][0][0],
        "bytes": sum(size for _, size, _ in facts["files"]),
        "text_bytes": sum(unit.text_bytes for unit in done),
        "text_field": facts["text_field"],
        "prompt_field": facts["prompt_field"],
        "validation": facts["validation"],
        "tokenizer_file": files[0].name if files else "",
        "empty": empty,
        "skipped": [example for unit in done for example in unit.examples][:SHOWN],
    }
    manifest = Manifest(np.dtype(tokenizer.dtype).name, about, splits, source, skipped)
    manifest.write(partial)
    sync(partial)
    partial.replace(out)
    sync(out.parent)
    _tidy(out)
    return manifest


def _tidy(out: Path) -> None:
    """Take away what was kept only to go on from."""
    for path in out.glob("unit-*.json"):
        path.unlink()


def _named(files: Sequence[Sequence[Any]]) -> str:
    return files[0][0] if len(files) == 1 else f"{files[0][0]} and {len(files) - 1} more"
