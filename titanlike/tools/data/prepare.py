"""Tokenizes text into a folder of token shards on all cores; resumes if interrupted. No torch.

All files are written to `OUT.partial`: first `plan.json` (the input files and the work units), then for each work unit its shards
and `unit-00012.json`, and finally the manifest. The complete folder is renamed to `OUT`.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from titanlike.config import UserError
from titanlike.config.sections import Tokenizer as Section
from titanlike.data.documents.files import File, convert_write_errors, list_inputs
from titanlike.data.documents.readers import Fields
from titanlike.data.tokens.shards import MANIFEST, Manifest, read_manifest
from titanlike.data.tokens.tokenization import FileSpan, Options, WorkUnit, WorkUnitResult, check_free_space, finish
from titanlike.data.tokens.tokenizer import Tokenizer, build_tokenizer
from titanlike.tools.data.work_units import read_result, split_work_units
from titanlike.tools.data.workers import process_in_parallel, process_serially
from titanlike.utils import system
from titanlike.utils.file_lock import FileLock, LockHeld
from titanlike.utils.files import atomic_write_text, fsync_directory

PLAN = "plan.json"
FORMAT = 1


@dataclass(frozen=True)
class Progress:
    """Progress of a preparation."""

    bytes_read: int
    total_bytes: int
    resumed_bytes: int  # read by earlier starts, included in bytes_read
    tokens: int  # made since this start
    seconds: float  # since this start
    already_complete: bool = False  # an earlier start finished the folder


OnProgress = Callable[[Progress], None]


def prepare(
    inputs: Sequence[str | File],
    out: Path,
    tokenizer: Section,
    *,
    fields: Fields | None = None,
    validation_share: float = 0.0,
    workers: int | None = None,
    bad: Literal["stop", "skip"] = "stop",
    on_progress: OnProgress = lambda progress: None,
) -> Manifest:
    """Tokenizes files, folders, patterns or URLs into a folder of token shards. After an interruption the same call resumes.

    `workers` is the number of processes: by default one for each core; with 0 this process does the work. `bad` says whether a
    bad record raises or is skipped and counted. `on_progress` is called a few times a second.
    """
    if not 0.0 <= validation_share < 1.0:
        raise UserError(f"--validation = {validation_share}: give a fraction of the documents, at least 0 and below 1")
    if not out.name:
        raise UserError(f"--out = {str(out)!r} is not a name for a new folder")
    built = build_tokenizer(tokenizer)
    fields = fields or Fields()
    partial = out.with_name(f"{out.name}.partial")
    with convert_write_errors(out), _locked(out):
        outputs = {out.resolve(), partial.resolve()}
        files = [file for file in list_inputs(inputs) if outputs.isdisjoint(Path(file.name).resolve().parents)]
        if not files:
            raise UserError("no input files")
        parameters = {
            "format": FORMAT,
            "tokenizer": built.fingerprint,
            "text_field": fields.text,
            "prompt_field": fields.prompt,
            "validation": validation_share,
            "files": [[file.name, file.size, file.version] for file in files],
        }
        if (out / MANIFEST).exists():
            _check_same_parameters(out, parameters)
            _remove_results(out)
            on_progress(Progress(0, 0, 0, 0, 0.0, already_complete=True))
            return read_manifest(str(out))
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"{out} exists and is not a folder of token shards; give another --out")
        units = _plan(partial, files, parameters)
        options = Options(partial, tokenizer, fields, validation_share, bad == "skip")
        results = _process(units, options, built, workers, on_progress)
        manifest = finish(partial, out, results, built, options, files)
        _remove_results(out)
        return manifest


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Keeps other processes from preparing the same folder."""
    try:
        lock = FileLock(out.with_name(f".{out.name}.lock"))
    except LockHeld as holder:
        raise UserError(f"{out} is being prepared by {holder}; wait for it, or give another --out") from None
    try:
        yield
    finally:
        lock.path.unlink(missing_ok=True)
        lock.release()


def _plan(partial: Path, files: Sequence[File], parameters: dict[str, Any]) -> list[WorkUnit]:
    """Returns the work units of the start that is resumed, or creates them."""
    plan = partial / PLAN
    if any(partial.glob("unit-*.json")):
        _check_same_parameters(partial, parameters)
    else:
        if plan.exists():
            shutil.rmtree(partial)  # no finished work is lost
        indices = {id(file): index for index, file in enumerate(files)}
        units = [[(indices[id(s.file)], s.size, s.bounds) for s in unit.spans] for unit in split_work_units(files)]
        partial.mkdir(parents=True, exist_ok=True)
        atomic_write_text(plan, json.dumps({**parameters, "units": units}))
        fsync_directory(partial)
    return [
        WorkUnit(n, tuple(FileSpan(files[i], size, bounds and (bounds[0], bounds[1])) for i, size, bounds in spans))
        for n, spans in enumerate(json.loads(plan.read_text())["units"])
    ]


def _check_same_parameters(folder: Path, parameters: dict[str, Any]) -> None:
    """Raises if the folder was created with other parameters."""
    try:
        before = json.loads((folder / PLAN).read_text())
        differences = [
            _difference(key, before[key], value) for key, value in parameters.items() if before[key] != value
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        differences = [f"its {PLAN} cannot be read ({type(error).__name__}: {error})"]
    if differences:
        raise UserError(
            f"{folder} was {'started' if folder.suffix == '.partial' else 'prepared'} with different parameters: "
            f"{'; '.join(differences)}; remove that folder, or give another --out"
        )


def _difference(key: str, before: Any, now: Any) -> str:
    if key == "tokenizer":
        return "the tokenizer differs"
    if key != "files":
        return f"--{key.replace('_', '-')} was {before!r} and is {now!r}"
    old, new = ({name: rest for name, *rest in files} for files in (before, now))
    for name in [*old, *new]:
        if name not in new:
            return f"input file {name} was removed"
        if name not in old:
            return f"input file {name} was added"
        if old[name] != new[name]:
            return f"input file {name} has changed"
    return "the order of the input files differs"


def _process(
    units: Sequence[WorkUnit], options: Options, tokenizer: Tokenizer, workers: int | None, on_progress: OnProgress
) -> list[WorkUnitResult]:
    """Processes all work units that are not finished. Returns the results of all, in order."""
    token_bytes = np.dtype(tokenizer.dtype).itemsize
    earlier = (read_result(options.folder, unit.number, token_bytes) for unit in units)
    results = {result.unit: result for result in earlier if result is not None}
    remaining = [unit for unit in units if unit.number not in results]
    total = sum(unit.size for unit in units)
    resumed = total - sum(unit.size for unit in remaining)
    started = time.monotonic()

    def report(read: int, tokens: int) -> None:
        on_progress(Progress(resumed + read, total, resumed, tokens, time.monotonic() - started))

    check_free_space(options.folder, [span for unit in remaining for span in unit.spans], tokenizer)
    count = min(system.num_cores() if workers is None else workers, len(remaining))
    try:
        if count and len(remaining) > 1:
            new = process_in_parallel(remaining, options, count, report)
        else:
            new = process_serially(remaining, options, tokenizer, report)
    finally:
        for path in options.folder.glob("*.partial"):  # left by processes that were killed
            path.unlink()
    results |= {result.unit: result for result in new}
    return [results[unit.number] for unit in units]


def _remove_results(out: Path) -> None:
    """Removes the results of the work units, which only a resume needs."""
    for path in out.glob("unit-*.json"):
        path.unlink()
