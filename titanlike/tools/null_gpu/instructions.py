"""What a compiled Triton kernel reads more than once, and the instructions that its warps issue: from its Triton IR and, where the
disassembler of the CUDA toolkit is installed (Triton's wheel has it), its machine code."""

import importlib.util
import json
import math
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

POINTER = re.compile(r"(?:tensor<((?:\d+x)+))?!tt\.ptr<(\w+)>")
# Bytes of a load in machine code, by its suffix; without one, 4.
LOADED = {".128": 16, ".64": 8, ".U16": 2, ".S16": 2, ".U8": 1, ".S8": 1}


@dataclass
class Loop:
    """A loop of the Triton IR."""

    trips: int  # 1 if it depends on an argument
    loads: list[tuple[int, int]] = field(default_factory=list)  # elements of a program in an iteration, and their bytes

    @property
    def elements(self) -> int:
        """Elements of a program in all iterations."""
        return self.trips * max(elements for elements, _ in self.loads)


@dataclass(frozen=True)
class Binary:
    """A compiled kernel in Triton's cache."""

    cubin: Path

    @cached_property
    def ir(self) -> str:
        """The Triton IR."""
        return self.cubin.with_suffix(".ttir").read_text()

    @cached_property
    def arguments(self) -> list[str]:
        """Names of the arguments that are tensors."""
        return re.findall(r"(%\w+): !tt\.ptr", next(line for line in self.ir.splitlines() if "tt.func" in line))

    @cached_property
    def _accesses(self) -> tuple[list[Loop], list[tuple[str, str, int]]]:
        """Returns the loops that load, and of each load and store its operation, its argument and its loop (-1: none)."""
        constants = {name: int(value) for name, value in re.findall(r"(%\w+) = arith\.constant (-?\d+) :", self.ir)}
        argument_of = {name: name for name in self.arguments}
        loops, accesses, open_loops = list[Loop](), list[tuple[str, str, int]](), list[tuple[int, str]]()
        for line in self.ir.splitlines():
            indent = line[: len(line) - len(line.lstrip())]
            if open_loops and line.startswith(open_loops[-1][1] + "}"):
                open_loops.pop()
            if bounds := re.search(r"scf\.for %\w+ = (%\w+) to (%\w+) step (%\w+)", line):
                open_loops.append((len(loops), indent))
                known = [constants[name] for name in bounds.groups() if name in constants]
                loops.append(Loop(-(-(known[1] - known[0]) // known[2]) if len(known) == 3 else 1))
            for name, source in re.findall(r"(%\w+) = (%\w+)", line.partition("iter_args")[2]):
                argument_of[name] = argument_of.get(source, "")
            if moved := re.match(r"\s*(%\w+) = tt\.(?:addptr|splat|broadcast|expand_dims) (%\w+)", line):
                argument_of[moved[1]] = argument_of.get(moved[2], "")
            access = re.search(r"tt\.(load|store) (%\w+)", line)
            if access and (argument := argument_of.get(access[2])) and (pointer := POINTER.search(line)):
                number = open_loops[-1][0] if open_loops else -1
                accesses.append((access[1], argument, number))
                shape = [int(size) for size in (pointer[1] or "").split("x") if size]
                if number >= 0 and access[1] == "load" and shape and shape[-1] > 1:
                    loops[number].loads.append((math.prod(shape), item_bytes(pointer[2])))
        return [loop for loop in loops if loop.loads], accesses

    def passes(self, argument: str) -> tuple[int, int]:
        """Returns how often a tensor is read, once for each loop that loads it, and whether it is written."""
        accesses = self._accesses[1]
        loads = {number for operation, name, number in accesses if name == argument and operation == "load"}
        return len(loads - {-1}) or len(loads), int(("store", argument) in {each[:2] for each in accesses})

    def issued(self, elements: int) -> float:
        """Returns the instructions that all warps issue together for this number of elements."""
        instructions, loops = _machine_code(self.cubin)
        loops = [body for body in loops if _loaded(body)]
        sources = self._accesses[0]
        if loops and sources:
            total = 0.0
            for index, body in enumerate(loops):
                source = sources[min(index, len(sources) - 1)]
                per_thread = _loaded(body) / sum(size for _, size in source.loads)
                total += len(body) / per_thread * elements / 32
            return total
        shapes = re.findall(r"tensor<((?:\d+x)+)", self.ir)
        block = max((math.prod(int(size) for size in shape[:-1].split("x")) for shape in shapes), default=1)
        per_program = max([block, *(loop.elements for loop in sources)])
        warps = json.loads(self.cubin.with_suffix(".json").read_text())["num_warps"]
        return len(instructions) * warps * elements / per_program


def item_bytes(dtype: str) -> int:
    """Returns the bytes of an element: of bf16, i64 or f8E4M3FN in the IR, and of torch's dtypes."""
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


@cache
def disassembler() -> str | None:
    """Returns the path of nvdisasm: Triton's, or that in PATH."""
    triton = importlib.util.find_spec("triton")
    shipped = Path(triton.origin if triton and triton.origin else "").parent / "backends/nvidia/bin/nvdisasm"
    return str(shipped) if shipped.exists() else shutil.which("nvdisasm")


def _machine_code(cubin: Path) -> tuple[list[str], list[list[str]]]:
    """Returns the instructions of a kernel, and those of each innermost loop."""
    command = [disassembler() or "", "-ndf", "-c", str(cubin)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    instructions, labels = list[str](), dict[str, int]()
    for line in text.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*);", line):
            instructions.append(instruction[1])
    return instructions, [instructions[start : end + 1] for start, end in _innermost(instructions, labels)]


def _innermost(instructions: list[str], labels: dict[str, int]) -> Iterator[tuple[int, int]]:
    """Yields the first and the last instruction of each loop without another one in it."""
    jumps = [
        (labels[target[1]], index)
        for index, instruction in enumerate(instructions)
        if (target := re.search(r"BRA.*\((\.L_\w+)\)", instruction)) and labels.get(target[1], index) < index
    ]
    for start, end in jumps:
        if not any(start <= first and last <= end and (first, last) != (start, end) for first, last in jumps):
            yield start, end


def _loaded(body: list[str]) -> int:
    """Returns the bytes that a thread loads from memory in an iteration."""
    loads = [match[1] for instruction in body if (match := re.search(r"\bLDG(?:STS)?\.E(\S*)", instruction))]
    return sum(next((size for suffix, size in LOADED.items() if suffix in load), 4) for load in loads)
