"""Tokenizes text into a folder of token shards on all cores; resumes if interrupted. No torch.

All files are written to `OUT.partial`: first `plan.json` (the input files and the work units), then for each work unit its shards
and `unit-00012.json`, and finally the report and the manifest. The complete folder is renamed to `OUT`. The stages of `quality`
have passes over the text before tokenization, and write to `OUT.partial/stages`.
"""

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from titanlike.config import UserError
from titanlike.config.sections import Tokenizer as Section
from titanlike.data.documents.data_files import File, convert_write_errors
from titanlike.data.documents.listing import list_files
from titanlike.data.documents.readers import Fields
from titanlike.data.tokens.shards import MANIFEST, Manifest, read_manifest
from titanlike.data.tokens.tokenization import FileSpan, WorkUnit, WorkUnitResult, finish
from titanlike.data.tokens.tokenizer import Tokenizer, build_tokenizer
from titanlike.data.tokens.work_units import read_result, remove_results, split_work_units
from titanlike.tools.data.quality.options import FOLDER, Quality, Stage, WorkerOptions
from titanlike.tools.data.quality.passes import build_report, finish_pass, is_finished
from titanlike.tools.data.quality.report import REASONS, REPORT
from titanlike.tools.data.workers import process_in_parallel, process_serially
from titanlike.utils import system
from titanlike.utils.atomic_write import atomic_write_text, fsync_directory
from titanlike.utils.file_lock import FileLock, LockHeld

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
    passes: tuple[int, int] = (1, 1)  # number of the pass over the text, and how many there are
    stage: Stage = "tokenize"


OnProgress = Callable[[Progress], None]


def prepare(
    inputs: Sequence[str | File],
    out: Path,
    tokenizer: Section,
    *,
    fields: Fields | None = None,
    validation_share: float = 0.0,
    test_share: float = 0.0,
    quality: Quality | None = None,
    workers: int | None = None,
    bad: Literal["stop", "skip"] = "stop",
    on_progress: OnProgress = lambda progress: None,
) -> Manifest:
    """Tokenizes files, folders, patterns or URLs into a folder of token shards. After an interruption the same call resumes.

    `quality` selects documents. `workers` is the number of processes: by default one for each core; with 0 this process does the
    work. `bad` says whether a bad record raises or is skipped and counted. `on_progress` is called a few times a second.
    """
    for name, share in (("--validation", validation_share), ("--test", test_share)):
        if not 0.0 <= share < 1.0:
            raise UserError(f"{name} = {share}: give a fraction of the documents, at least 0 and below 1")
    if validation_share + test_share >= 1.0:
        raise UserError(f"--validation = {validation_share} and --test = {test_share} leave no document for training")
    if not out.name:
        raise UserError(f"--out = {str(out)!r} is not a name for a new folder")
    built = build_tokenizer(tokenizer)
    fields, quality = fields or Fields(), quality or Quality()
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
            **({"test": test_share} if test_share else {}),
            **quality.parameters(),
        }
        if (out / MANIFEST).exists():
            _check_same_parameters(out, parameters)
            _remove_results(out)
            on_progress(Progress(0, 0, 0, 0, 0.0, already_complete=True))
            return read_manifest(str(out))
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"{out} exists and is not a folder of token shards; give another --out")
        units = _plan(partial, files, parameters)
        job = WorkerOptions(partial, tokenizer, fields, validation_share, bad == "skip", test_share, quality)
        results = []
        for stage in quality.stages:
            results = _process(units, replace(job, stage=stage), built, workers, on_progress)
        found = build_report(results, job)
        if not found["documents"]["kept"]["documents"] and found["removed"]:
            shutil.rmtree(partial)
            tallies = found["removed"].items()
            counts = ", ".join(f"{tally['documents']:,} for {REASONS[reason]}" for reason, tally in tallies)
            raise UserError(f"every document was removed: {counts}; give other limits, or another --filter")
        atomic_write_text(partial / REPORT, json.dumps(found, indent=1) + "\n")
        manifest = finish(partial, out, results, built, job, files)
        _remove_results(out)
        return manifest


def list_inputs(inputs: Sequence[str | File]) -> list[File]:
    """Lists the files of a command's INPUT arguments, which must not overlap."""
    files = [file for item in inputs for file in ([item] if isinstance(item, File) else list_files(item, "INPUT"))]
    if twice := [name for name, count in Counter(file.name for file in files).items() if count > 1]:
        raise UserError(f"INPUT: {twice[0]} is given twice; give each file once")
    return files


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
    if any(partial.glob("unit-*.json")) or any((partial / FOLDER).glob("*")):
        _check_same_parameters(partial, parameters)
    else:
        if plan.exists():
            shutil.rmtree(partial)  # no finished work is lost
        indices = {id(file): index for index, file in enumerate(files)}
        units = [[(indices[id(s.file)], s.size, s.bounds) for s in unit.spans] for unit in split_work_units(files)]
        (partial / FOLDER).mkdir(parents=True, exist_ok=True)
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
    except (OSError, ValueError) as error:
        differences = [f"its {PLAN} cannot be read ({type(error).__name__}: {error})"]
    else:
        keys = [key for key in {**before, **parameters} if key != "units"]
        values = [(key, before.get(key), parameters.get(key)) for key in keys]
        differences = [_difference(key, was, now) for key, was, now in values if was != now]
    if differences:
        raise UserError(
            f"{folder} was {'started' if folder.suffix == '.partial' else 'prepared'} with different parameters: "
            f"{'; '.join(differences)}; remove that folder, or give another --out"
        )


def _difference(key: str, before: Any, now: Any) -> str:
    if key == "tokenizer":
        return "the tokenizer differs"
    if key == "filter":
        (was, _), (name, _) = before or (None, None), now or (None, None)
        return f"the source of --filter {name} has changed" if was == name else f"--filter was {was!r} and is {name!r}"
    if key != "files":
        return f"--{key.replace('_', '-')} was {before!r} and is {now!r}"
    old, new = ({name: rest for name, *rest in files} for files in (before or [], now))
    for name in [*old, *new]:
        if old.get(name) != new.get(name):
            change = "was removed" if name not in new else "was added" if name not in old else "has changed"
            return f"input file {name} {change}"
    return "the order of the input files differs"


def _process(
    units: Sequence[WorkUnit], job: WorkerOptions, tokenizer: Tokenizer, workers: int | None, on_progress: OnProgress
) -> list[WorkUnitResult]:
    """Does a pass over the work units that are not finished. Returns the results of tokenization, in order."""
    finished = {unit.number for unit in units if is_finished(unit.number, job)}
    results: dict[int, WorkUnitResult] = {}
    if job.stage == "tokenize":
        token_bytes = np.dtype(tokenizer.dtype).itemsize
        earlier = (read_result(job.folder, number, token_bytes) for number in finished)
        results = {result.unit: result for result in earlier if result is not None}
        finished = set(results)
    remaining = [unit for unit in units if unit.number not in finished]
    total = sum(unit.size for unit in units)
    resumed = total - sum(unit.size for unit in remaining)
    started = time.monotonic()
    stages = job.quality.stages
    passes = (stages.index(job.stage) + 1, len(stages))

    def report(read: int, tokens: int) -> None:
        seconds = time.monotonic() - started
        on_progress(Progress(resumed + read, total, resumed, tokens, seconds, passes=passes, stage=job.stage))

    count = min(system.num_cores() if workers is None else workers, len(remaining))
    try:
        # A filter of one's own runs in another process, which it can end.
        if count and (len(remaining) > 1 or job.quality.own):
            new = process_in_parallel(remaining, job, count, report)
        else:
            new = process_serially(remaining, job, tokenizer, report)
        finish_pass(units, job)
    finally:  # left by processes that were killed
        for path in [*job.folder.glob("*.partial"), *job.stages.glob("*.partial")]:
            path.unlink()
    results |= {result.unit: result for result in new if result}
    return [results[unit.number] for unit in units if unit.number in results]


def _remove_results(out: Path) -> None:
    """Removes the results of the work units and of the stages, which only a resume needs."""
    remove_results(out)
    shutil.rmtree(out / FOLDER, ignore_errors=True)
