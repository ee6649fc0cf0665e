"""What was measured beside torchtitan, Megatron-LM and nanochat, as the table of README.md.

    python -m benchmarks.other_projects

It reads the recorded results only. A cell without a measurement says so.
"""

import json
import statistics
from typing import Any

from benchmarks.common import ROOT
from benchmarks.common import table as table_of

PROJECTS = ("titanlike", "torchtitan", "Megatron-LM", "nanochat")
NOT_MEASURED = "not measured"


def read(name: str) -> dict[str, Any]:
    """Returns a recorded result."""
    found: dict[str, Any] = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
    return found


def row(name: str, cells: dict[str, str]) -> list[str]:
    """Returns the cells of a row."""
    return [name, *(cells.get(project, NOT_MEASURED) for project in PROJECTS)]


def speed(name: str, label: str, *, with_memory: bool = True) -> list[str]:
    """Returns tokens/s, and the peak memory on a GPU, of a comparison of `benchmarks/run.py`."""
    cells = {}
    for project, subject in (("titanlike", "titanlike.best"), ("torchtitan", "torchtitan_0_2.best")):
        measured = read(name)["rows"][subject]
        cells[project] = f"{measured['tokens_per_second']:,.0f}"
        cells[project] += f"; {measured['peak_memory_gib']:.1f} GiB" if with_memory else ""
    return row(label, cells)


def null_gpu(case: str, label: str) -> list[str]:
    """Returns launches and reserved memory of a step on a null GPU, of torchtitan with CUDA graphs and without."""
    found = read("null_gpu_side_by_side")["cases"][case]
    names = ("titanlike", "torchtitan", "torchtitan, no CUDA graphs", "nanochat")
    cells = {
        name: f"{found[name]['launches']['total']:,}; {found[name]['reserved_peak_gib']:.1f} GiB" for name in names
    }
    without = cells.pop("torchtitan, no CUDA graphs")
    cells["torchtitan"] = f"{without}. With CUDA graphs: {cells['torchtitan']}"
    return row(label, cells)


def tokenizing(tokenizer: str, label: str) -> list[str]:
    """Returns tokens/s from text to token shards."""
    measured = read("data_prepare_cpu")["speed"][tokenizer]
    rates = {
        project: statistics.median(measured["tokens"] / seconds[project] for seconds in measured["seconds"])
        for project in ("titanlike", "nanochat")
    }
    return row(label, {project: f"{rate / 1e6:.1f} million" for project, rate in rates.items()})


def table() -> str:
    """Returns the table."""
    rows = [
        speed("gpu/1b_bfloat16", "Llama 3.2 1B, bfloat16, one H200, 2 x 8,192 tokens: tokens/s; allocated memory"),
        speed(
            "gpu/8b_float8", "Llama 3 8B with 8 blocks, float8, one H200, 2 x 8,192 tokens: tokens/s; allocated memory"
        ),
        speed("cpu_50m_float32", "Llama, 50 M parameters, float32, two CPU cores: tokens/s", with_memory=False),
        null_gpu("1b", "Llama 3.2 1B, bfloat16, a simulated H100, 4 x 8,192 tokens: launches; reserved memory"),
        tokenizing("Qwen3", "text to tokens of Qwen3, two CPU cores: tokens/s"),
        row("several GPUs: tokens/s", {}),
    ]
    return table_of(("", *PROJECTS), rows)


if __name__ == "__main__":
    print(table())
