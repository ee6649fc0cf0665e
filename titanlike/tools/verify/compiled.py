"""`titanlike verify --compile`: compares a module's compiled code with its eager code, in one process on the CPU.

Both are recorded (`record.py`) and compared (`comparison.py`) like one process and a rank of a layout.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import nn

from titanlike.config import UserError
from titanlike.parallelisms.blocks import find_blocks
from titanlike.tools.planning.torch_internals import eager_random_numbers
from titanlike.tools.verify import comparison as phases
from titanlike.tools.verify.comparison import ProcessRecord
from titanlike.tools.verify.diagnosis import first_finding_of_compiled
from titanlike.tools.verify.module import Report, load, not_exiting
from titanlike.tools.verify.options import parse_tolerance
from titanlike.tools.verify.record import Functions, record
from titanlike.utils import system

INDUCTOR = "inductor"
# Backends, each with the parts of the compiler that the one before it has, and one more.
PARTS = {
    "eager": "TorchDynamo, which captures the graph",
    "aot_eager": "AOTAutograd, which traces the backward pass and chooses what it recomputes",
    "aot_eager_decomp_partition": "the decompositions of operators",
    INDUCTOR: "the code that Inductor generates",
}


@dataclass(frozen=True)
class KnownBug:
    """A silent bug of torch.compile."""

    issue: int  # of pytorch/pytorch
    releases: tuple[
        tuple[int, int], tuple[int, int]
    ]  # the first one that has it, and the last one in which it was found
    kind: str  # what differs first
    is_on_gpus_only: bool
    what: str
    remedy: str


KNOWN_BUGS = (
    KnownBug(
        193061, ((2, 10), (2, 14)), phases.GRADIENTS, True,
        "fused reductions do not write their slices of the gradient of a chunked parameter",
        "set TORCHINDUCTOR_MIX_ORDER_REDUCTION=0",
    ),
    KnownBug(
        190758, ((2, 11), (2, 15)), phases.WITH_DROPOUT, False,
        "with an activation memory budget below 1, the backward pass draws masks of torch's dropout again",
        "use another kind of activation checkpointing, or dropout that is a function of its inputs",
    ),
    KnownBug(
        96693, ((2, 1), (2, 10)), phases.ACCUMULATED, True,
        "with CUDA graphs, a micro-batch overwrites the gradients of the one before it",
        "compile without CUDA graphs",
    ),
)  # fmt: skip


def known_bugs(version: str = torch.__version__) -> list[KnownBug]:
    """Returns the known bugs of a version of torch."""
    release = tuple(int(number) for number in version.split(".")[:2])
    return [bug for bug in KNOWN_BUGS if bug.releases[0] <= release <= bug.releases[1]]


def verify_compiled(
    functions: Functions, *, backend: str = INDUCTOR, steps: int = 3, tolerance: str = "", seed: int = 0
) -> Report:
    """Compares a module that `functions.compile` compiles, or each block of which the backend does, with its eager code."""
    tolerances = parse_tolerance(tolerance, phases.COMPILED_TOLERANCES)
    eager = record(functions, steps=steps, seed=seed, mode="eager")
    return compare_compiled(eager, compiling(functions, backend), steps, tolerances, seed)


def verify_compiled_file(target: str, backend: str, steps: int, tolerance: str = "") -> NoReturn:
    """Runs `titanlike verify FILE.py:FUNCTION --compile`. Exits with 0 if compiled code agrees with eager code, 1 if not."""
    with not_exiting(target):
        functions = load(target)
        if functions.compile and backend:
            raise UserError(
                f"{target}: compile(model) of this file chooses the backend; remove --compile.backend={backend}"
            )
        backend = "" if functions.compile else backend or INDUCTOR
        check_backend(backend)
        print_title(target, backend or "its function compile", steps)
        tolerances = parse_tolerance(tolerance, phases.COMPILED_TOLERANCES)
        agrees = print_comparison(functions, lambda each: compiling(functions, each), backend, steps, tolerances)
    sys.exit(0 if agrees else 1)


def check_backend(backend: str) -> None:
    """Raises `UserError` if this machine cannot run the backend."""
    if backend == INDUCTOR and not system.cxx_compiler():
        raise UserError(
            "no C++ compiler, which the backend inductor needs: apt-get install g++, or use --compile.backend=aot_eager, which "
            "traces and differentiates like inductor, without code generation"
        )


def print_title(target: str, backend: str, steps: int) -> None:
    """Prints what is compared."""
    duration = f"{steps} step{'s' * (steps > 1)} of two micro-batches"
    print(f"{target} compiled with {backend} (torch {torch.__version__}) against eager code, {duration} on the CPU")
    hidden = ", ".join(f"pytorch #{bug.issue}" for bug in known_bugs() if bug.is_on_gpus_only)
    print(f"known silent bugs of this release that only GPUs show: {hidden}\n" if hidden else "", flush=True)


def print_comparison(
    eager: Functions, compiled: Callable[[str], Functions], backend: str, steps: int, tolerances: Mapping[str, float]
) -> bool:
    """Compares, and prints the result and the part of the compiler that is wrong. `compiled` returns the functions for a backend.
    Returns whether all agrees."""
    expected = record(eager, steps=steps, mode="eager")
    report = compare_compiled(expected, compiled(backend), steps, tolerances)
    print(report)
    if report.finding is None:
        return True
    kind, name = report.finding.comparison.kind, report.finding.first.name
    print(
        f"rounding explains a relative difference of {tolerances[kind]:.0e}; this one is {report.finding.first.size:.1e}"
    )
    for each, part in PARTS.items() if backend in PARTS else ():
        found = report if each == backend else compare_compiled(expected, compiled(each), steps, tolerances)
        if found.finding and (found.finding.comparison.kind, found.finding.first.name) == (kind, name):
            print(f"part of the compiler: {part} (backend {each} is the first with this difference)")
            break
    for bug in known_bugs():
        if bug.kind == kind and not bug.is_on_gpus_only:
            print(f"torch {torch.__version__} has pytorch #{bug.issue}: {bug.what}; {bug.remedy}")
    return False


def compare_compiled(
    expected: ProcessRecord, compiled: Functions, steps: int, tolerances: Mapping[str, float], seed: int = 0
) -> Report:
    """Compares compiled code with the record of eager code: the kinds that have a tolerance."""
    torch.compiler.reset()
    with eager_random_numbers():  # to compare gradients with dropout
        found = record(compiled, steps=steps, seed=seed, mode="compiled")
    comparisons = phases.compare(expected.only(tolerances), [found.only(tolerances)], (), tolerances)
    return Report(comparisons, first_finding_of_compiled(comparisons))


def compiling(functions: Functions, backend: str) -> Functions:
    """Returns functions that have `compile`: by default, it compiles each block of the module, or a module without blocks."""

    def compile_blocks(model: nn.Module) -> None:
        for block in find_blocks(model) or [model]:
            forward: Any = torch.compile(block.forward, backend=backend)
            block.forward = forward

    return functions if functions.compile else replace(functions, compile=compile_blocks)
