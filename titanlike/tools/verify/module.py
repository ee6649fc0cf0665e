"""`titanlike verify FILE.py:FUNCTION`: compares any module under any parallel plan with one process, on the CPU.

Each process records what it computes (`record.py`). `comparison.py` compares, `diagnosis.py` says what is wrong
first.
"""

import importlib.util
import inspect
import logging
import math
import multiprocessing
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, start_processes

from titanlike.config import UserError
from titanlike.config.base import nearest
from titanlike.distributed import environment, process_group
from titanlike.tools.verify import comparison as phases
from titanlike.tools.verify.comparison import Comparison, ProcessRecord
from titanlike.tools.verify.diagnosis import Diagnosis, first_finding
from titanlike.tools.verify.options import parse_mesh, parse_tolerance
from titanlike.tools.verify.record import Functions, batch_dimensions, record
from titanlike.utils import system


@dataclass(frozen=True)
class Report:
    """The result of a comparison."""

    comparisons: list[Comparison]
    finding: Diagnosis | None

    def __str__(self) -> str:
        lines = []
        for each in self.comparisons:
            skipped = f", {each.num_skipped} not compared" if each.num_skipped and each.kind != phases.OUTPUTS else ""
            count = "" if each.kind in (phases.LOSS, phases.NORM, phases.OUTPUTS) else f"{each.num_compared} tensors"
            result = "WRONG" if each.wrong else f"{each.worst:.1e}" if each.num_compared else "not compared"
            lines.append(f"  {each.title:<30} {count:>12}   {result}{skipped}")
            if each.wrong:
                break
        return "\n".join([*lines, "", str(self.finding or "equal within tolerance")])


def verify_module(functions: Functions, layout: str, *, steps: int = 3, tolerance: str = "", seed: int = 0) -> Report:
    """Compares a module under a layout, such as "shard=2,tensor=2", with one process. Starts the processes on this machine.

    The functions belong to an importable module, because the processes import them.
    """
    return _verify(functions, parse_mesh(layout), steps, tolerance, seed)


def verify_file(target: str, layout: str, steps: int, tolerance: str = "") -> NoReturn:
    """Runs `titanlike verify FILE.py:FUNCTION`. Exits with 0 if the layout agrees with one process, 1 if not."""
    try:
        with not_exiting(target):
            sizes = parse_mesh(layout)
            functions = load(target)
            title = " x ".join(f"{name} {size}" for name, size in sizes.items())
            title += f" ({math.prod(sizes.values())} processes)"
            duration = f"{steps} step{'s' * (steps > 1)}"
            print(f"{target} under {title} against one process, {duration} on the CPU")
            print(f"batch: {_describe_shares(functions, sizes)}\n", flush=True)
            result = _verify(target, sizes, steps, tolerance, seed=0)
    except UserError as error:
        environment.fail(error)
    except ProcessRaisedException as error:
        print(error.msg.strip(), file=sys.stderr)
        environment.fail(UserError(f"rank {error.error_index} raised the exception above"))
    print(result)
    sys.exit(1 if result.finding else 0)


@contextmanager
def not_exiting(target: str) -> Iterator[None]:
    """Raises `UserError` if a user's code ends the process, whose exit code would then say that all agrees."""
    try:
        yield
    except SystemExit as error:
        if error.code == 2:  # a rank has printed a user's mistake
            raise
        raise UserError(
            f"{target}: its code calls sys.exit({error.code!r}); remove that, so that it can be compared"
        ) from None


def load(target: str) -> Functions:
    """Imports FILE.py and returns its functions. The part after the colon names the one that returns the module."""
    file, _, name = target.rpartition(":") if not target.endswith(".py") else (target, "", "")
    name = name or "model"
    path = Path(file)
    if not path.is_file():
        raise UserError(
            f"{file} does not exist; give a Python file and its function that returns the module, such as build.py:model"
        )
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification and specification.loader
    module = importlib.util.module_from_spec(specification)
    sys.path.insert(0, str(path.parent.resolve()))  # it may import files beside it
    sys.modules[path.stem] = module  # for what pickles its classes
    specification.loader.exec_module(module)
    found: dict[str, Any] = {each.name: getattr(module, each.name, None) for each in fields(Functions)} | {
        "model": getattr(module, name, None)
    }
    defined = [
        each for each, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == path.stem
    ]
    if found["model"] is None:
        near = nearest(name, defined)
        raise UserError(
            f"{file} has no function {name}, which returns the module" + (f"; did you mean {near}?" if near else "")
        )
    if found["batch"] is None:
        raise UserError(
            f"{file} has no function batch: define batch(step), which returns the global batch of a step, a tensor or a tuple or "
            "dict of tensors"
        )
    for each, value in found.items():
        if value is not None and not callable(value):
            raise UserError(f"{each} in {file} is {type(value).__name__}; make it a function, or give it another name")
    return Functions(**found)


def _describe_shares(functions: Functions, sizes: Mapping[str, int]) -> str:
    divided = batch_dimensions(functions, sizes)
    if functions.shard_batch:
        return "divided by shard_batch"
    same = [name for name in sizes if name not in divided]
    return "; ".join(
        [f"ranks of {' x '.join(divided)} have consecutive rows"] * bool(divided)
        + [f"ranks of {' x '.join(same)} have the same rows"] * bool(same)
    )


def _verify(source: Functions | str, sizes: dict[str, int], steps: int, tolerance: str, seed: int) -> Report:
    if environment.rank_info().started_by_launcher:
        raise UserError("verify starts its own processes: run it without torchrun, and unset RANK and WORLD_SIZE")
    functions = load(source) if isinstance(source, str) else source
    divided = batch_dimensions(functions, sizes)
    tolerances = parse_tolerance(tolerance, phases.TOLERANCES)
    one = record(functions, steps=steps, seed=seed)
    num_ranks = math.prod(sizes.values())
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        # Ranks are forked from a process that has imported torch, which takes several seconds.
        multiprocessing.set_forkserver_preload([__name__])
        logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # a failed rank is reported below
        try:
            start_processes(
                _run_rank, (source, sizes, steps, seed, folder, port), nprocs=num_ranks, start_method="forkserver"
            )
        except ProcessExitedException as error:
            if error.exit_code == 2:  # the rank has printed a user's mistake
                sys.exit(2)
            ended = (
                f"was ended by {error.signal_name}" if error.signal_name else f"ended with exit code {error.exit_code}"
            )
            raise UserError(
                f"rank {error.error_index} {ended}; if the machine has too little memory, use a smaller model or fewer ranks"
            ) from None
        ranks = [torch.load(Path(folder, str(rank)), weights_only=False) for rank in range(num_ranks)]
    return compare_records(one, ranks, sizes, divided, tolerances)


def compare_records(
    one: ProcessRecord,
    ranks: Sequence[ProcessRecord],
    sizes: Mapping[str, int],
    divided: Sequence[str],
    tolerances: Mapping[str, float] = phases.TOLERANCES,
) -> Report:
    """Compares the records of the ranks with the record of one process."""
    comparisons = phases.compare(one, ranks, divided, tolerances)
    return Report(comparisons, first_finding(comparisons, sizes, divided))


def _run_rank(
    rank: int, source: Functions | str, sizes: dict[str, int], steps: int, seed: int, folder: str, port: int
) -> None:
    world_size = str(math.prod(sizes.values()))
    system.set_variables(
        {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }
    )  # fmt: skip
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # warns of slow conversions to full tensors
    with process_group.session("cpu", timeout=120.0):
        functions = load(source) if isinstance(source, str) else source
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        torch.save(record(functions, mesh, steps=steps, seed=seed), Path(folder, str(rank)))
