"""The kernels of one step on a null GPU by class: calls, bytes, and the predicted time.

    python -m titanlike.tools.null_gpu.ledger RECIPE [--hardware h200] [--gpus N] [--out FILE] [--section.key=value ...]

Trains the recipe on synthetic data for four steps, as rank 0 of N, and records the last one. See docs/performance.md.
"""

import argparse
import base64
import json
import math
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from titanlike.config import UserError
from titanlike.config.shipped import recipe_path
from titanlike.run.start import Arguments
from titanlike.tools.null_gpu import library, recipes
from titanlike.tools.null_gpu.instructions import Binary, disassembler, item_bytes
from titanlike.tools.null_gpu.kernels import Kernel, Parameters, class_of
from titanlike.tools.null_gpu.rates import Rates, device_of
from titanlike.tools.planning.hardware import load_hardware
from titanlike.tools.planning.job import Job
from titanlike.tools.programs import load_known

ADAMW = "_update"  # of `optim.fused_adamw`
SMALL_KERNEL = 2**20  # bytes, which take less than a launch
BOUND_BY_BYTES = 0.1  # instructions of a warp for each byte; from about twice as many, issuing takes longer
LONG_ROW = 2**17  # bytes: a second loop over such a row finds nothing of it in a cache


class Call(NamedTuple):
    """What the host issues: it runs a kernel on a stream, or has the stream record an event or wait for one."""

    what: str  # run, record or wait
    which: int
    stream: int


class Span(NamedTuple):
    """A kernel on a stream, in seconds from the begin of the step."""

    kernel: Kernel
    stream: int
    start: float
    end: float


@dataclass(frozen=True)
class Ledger:
    """A recorded step."""

    kernels: list[Kernel]
    calls: list[Call]
    parameters: Parameters
    torch: str

    def timeline(self, rates: Rates) -> list[Span]:
        """Returns when each kernel runs: a stream runs one after another, and waits for events of other streams. The host is
        taken to be ahead of them."""
        seconds = [rates.seconds(kernel) for kernel in self.kernels]
        free, events, spans = defaultdict[int, float](float), dict[int, float](), list[Span]()
        for what, which, stream in self.calls:
            if what == "record":
                events[which] = free[stream]
            elif what == "wait":
                free[stream] = max(free[stream], events.get(which, 0.0))
            else:
                start = free[stream]
                free[stream] += seconds[which]
                spans.append(Span(self.kernels[which], stream, start, free[stream]))
        return spans

    def classes(self, spans: Sequence[Span]) -> dict[str, dict[str, float]]:
        """Returns calls, GB and predicted milliseconds of each class, the longest first. Matmuls and attention have no GB."""
        found: dict[str, dict[str, float]] = {}
        for kernel, _, start, end in spans:
            row = found.setdefault(class_of(kernel, self.parameters), {"calls": 0, "GB": 0.0, "ms": 0.0})
            row["calls"] += 1
            row["GB"] += 0.0 if kernel.is_matmul or kernel.is_attention else kernel.bytes / 1e9
            row["ms"] += 1e3 * (end - start)
        return dict(sorted(found.items(), key=lambda each: -each[1]["ms"]))


def read(folder: Path, rank: int = 0, *, instructions: bool = True) -> Ledger:
    """Reads what a process has left in the folder of `record.environment`. Without instructions, bytes alone bound kernels."""
    found = json.loads((folder / f"ledger-{rank}.json").read_text())
    count = instructions and disassembler() is not None
    with ThreadPoolExecutor() as pool:  # which waits for disassemblers
        kernels = list(pool.map(lambda each: kernel_of(each, folder, count=count), found["kernels"]))
    return Ledger(kernels, [Call(*call) for call in found["calls"]], Parameters(**found["parameters"]), found["torch"])


def kernel_of(facts: dict[str, Any], folder: Path, *, count: bool) -> Kernel:
    """Returns a kernel of a record, whose binaries are in the folder. `count`: also its instructions."""
    hashes, elements, gigabytes = (facts.pop(name, None) for name in ("hashes", "elements", "gigabytes"))
    facts["tensors"] = tuple((tuple(shape), dtype) for shape, dtype in facts["tensors"])
    if facts["kind"] == "triton":
        binaries = [Binary(file) for each in hashes or () if (file := _cubin(folder, facts["name"], each)).exists()]
        facts["bytes"] = _moved(facts["tensors"], binaries, gigabytes)
        if gigabytes is None:  # not of inductor: its integers are no sizes of dimensions
            elements = max((math.prod(shape) for shape, _ in facts["tensors"]), default=0)
        if facts["name"] == ADAMW:  # its tensors are a table of pointers, and a row for each of its programs
            from titanlike.optim.fused_adamw import SIZE  # imports triton

            facts["bytes"] = facts["tensors"][1][0][0] * SIZE * 7 * 4  # reads four float32 numbers and writes three
        if count and "foreach" not in facts["name"]:  # each program of these has one branch of many
            facts["issued"] = _issued(binaries, elements, facts["bytes"])
    return Kernel(**facts)


def _issued(binaries: Sequence[Binary], elements: int, size: int) -> float:
    """Returns the instructions of the configuration with fewest, which autotuning is taken to choose. Disassembling is slow: only
    until it is certain that bytes take longer."""
    fewest = math.inf
    for binary in binaries if size > SMALL_KERNEL else ():
        fewest = min(fewest, binary.issued(elements))
        if fewest < BOUND_BY_BYTES * size:
            break
    return 0.0 if fewest == math.inf else fewest


def _cubin(folder: Path, name: str, key: str) -> Path:
    """Returns the file of a kernel in Triton's cache."""
    return folder / "triton" / base64.b32encode(bytes.fromhex(key)).decode().rstrip("=") / f"{name}.cubin"


def _moved(tensors: Sequence[tuple[tuple[int, ...], str]], binaries: Sequence[Binary], gigabytes: float | None) -> int:
    """Returns the bytes of a Triton kernel. Inductor counts what several views of a tensor read several times, and what several
    loops read once."""
    sizes = [math.prod(shape) * item_bytes(dtype) for shape, dtype in tensors]
    if not binaries:
        return round((gigabytes or 0) * 1e9) or sum(sizes)
    once = again = 0
    for (shape, dtype), size, argument in zip(tensors, sizes, binaries[0].arguments, strict=False):
        reads, writes = binaries[0].passes(argument)
        once += size * (min(reads, 1) + writes)
        if shape and shape[-1] * item_bytes(dtype) > LONG_ROW:
            again += size * max(0, reads - 1)
    return min(once, round(gigabytes * 1e9) if gigabytes else once) + again


def measure(
    path: Path, arguments: Sequence[str], gpus: int, hardware: str, *, instructions: bool = True, **options: Any
) -> tuple[Ledger, Rates, dict[str, Any]]:
    """Trains a recipe as rank 0 of the GPUs. Returns its ledger, the rates of its kernels, and the record of the process.
    `options` are of `subprocess.run`."""
    described = load_hardware(hardware)
    device = device_of(described)
    overrides = Arguments([str(path), *arguments]).overrides
    job = Job(load_known(path, overrides), gpus)
    keys = [f"--{key}={value}" for key, value in overrides.items()]
    with tempfile.TemporaryDirectory(
        prefix="null-gpu-", ignore_cleanup_errors=True
    ) as name:  # a compiler may still write
        _, found = recipes.train(path, gpus, keys, device, folder=Path(name), ledger=True, **options)
        ledger = read(Path(name), instructions=instructions)
    return ledger, Rates(job, described, device), found["processes"][0]


def summary(ledger: Ledger, rates: Rates, process: dict[str, Any]) -> dict[str, Any]:
    """Returns the sums of a ledger, for a JSON file. Launches are those that the null device counts, copies among them."""
    spans = ledger.timeline(rates)
    classes = ledger.classes(spans)
    seconds = max(span.end for span in spans)
    training = rates.job.recipe.training
    return {
        "hardware": rates.hardware.name,
        "torch": ledger.torch,
        "launches": sum(process["steps"][-1]["launches"].values()),
        "calls": len(spans),
        "GB": sum(row["GB"] for name, row in classes.items() if name != "collectives"),
        "predicted_ms": 1e3 * seconds,
        "predicted_tokens_per_second_per_gpu": training.tokens_per_step / rates.job.num_gpus / seconds,
        "allocated_gib": process["allocated_peak"] / 2**30,
        "classes": classes,
    }


def table(found: dict[str, Any]) -> str:
    """Returns the sums as a Markdown table."""
    rows = [(name, row["calls"], row["GB"], row["ms"]) for name, row in found["classes"].items()]
    rows.append(("step", found["calls"], found["GB"], found["predicted_ms"]))
    lines = [f"| {name} | {calls:,.0f} | {size:.1f} | {ms:.1f} |" for name, calls, size, ms in rows]
    return "\n".join(["| | calls | GB | predicted ms |", "|---|---|---|---|", *lines])


def main() -> None:
    """Prints the table. `--out` writes the sums, with each kernel."""
    parser = argparse.ArgumentParser(description="Records a step of a recipe on a null GPU, kernel by kernel.")
    parser.add_argument("recipe", type=recipe_path, metavar="RECIPE")
    parser.add_argument("--hardware", default="h200", metavar="NAME|FILE")
    parser.add_argument(
        "--gpus", type=int, default=1, help="a job of so many GPUs, of which this runs rank 0 (default: 1)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON")
    options, overrides = parser.parse_known_args()
    try:
        ledger, rates, process = measure(options.recipe, overrides, options.gpus, options.hardware)
    except (UserError, library.Unavailable) as error:
        sys.exit(f"error: {error}")
    found = summary(ledger, rates, process)
    print(table(found))
    print(f"\n{found['launches']:,} launches, {found['allocated_gib']:.2f} GiB, predicted", end=" ")
    print(f"{found['predicted_tokens_per_second_per_gpu']:,.0f} tokens/s per GPU")
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
