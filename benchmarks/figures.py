"""From what the subjects of `benchmarks/run.py` wrote to the figures of a table."""

import math
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.models import MODELS, shape_of
from titanlike.metrics.hardware import peak_flops

AGREE_STEPS = 20
AGREE = {"float32": 1e-3, "bfloat16": 2e-2, "float8": 5e-2}  # the largest relative difference of a loss from plain's


def figures(one: dict[str, Any], found: dict[str, dict[str, Any]], run: dict[str, Any]) -> dict[str, Any]:
    """A row's figures, from what it wrote and what plain's rows wrote in the same run."""
    if "failed" in one:
        return one
    tokens = run["tokens_per_step"] * run["block"]
    rate = statistics.median(tokens / seconds for seconds in one["blocks"])
    result = one | {"tokens_per_second": rate, "losses": one["losses"][:AGREE_STEPS]}
    for row, other in found.items():
        if row.startswith("plain.") and "failed" not in other:
            result[f"of_{row}"] = ratio(one, other)
            worst = max(abs(a - b) / abs(b) for a, b in zip(result["losses"], other["losses"], strict=False))
            result["loss_differs"] = min(worst, result.get("loss_differs", worst))
            result["losses_agree"] = result["loss_differs"] <= AGREE[run["precision"]]
    model = MODELS[run["model"]]
    shape, length = shape_of(model), model.seq_len
    full = shape.flops_per_token(length)
    causal = (full + shape.flops_per_token(0)) / 2  # half of the pairs of tokens
    measured = run["limits"]["kinds"][run["precision"]]
    result["of_the_products_rate"] = rate * full / measured["products_flops_per_second"]
    result["of_the_floor"] = rate * measured["floor_seconds_per_token"]
    peak = peak_flops(one["device"])
    if peak:
        result |= {"mfu": rate * full / peak, "mfu_causal": rate * causal / peak}
    return result


def ratio(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """How many times as fast as another, block by block: each is held against its neighbour in time."""
    ratios = sorted(b / a for a, b in zip(one["blocks"], other["blocks"], strict=False))
    quarter = len(ratios) // 4
    return {
        "median": statistics.median(ratios),
        "low": ratios[quarter],  # half of all blocks lie between these
        "high": ratios[-1 - quarter],
    }


def against_peers(rows: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """titanlike's fastest row against the fastest of all peers' rows, and the smallest memory and start of any of them."""
    done = {row: one for row, one in rows.items() if "failed" not in one}
    ours = {row: one for row, one in done.items() if row.startswith("titanlike.")}
    peers = {
        row: one
        for row, one in done.items()
        if not row.startswith(("titanlike.", "plain.")) and one.get("losses_agree")
    }
    if not ours or not peers:
        return None
    mine, theirs = (max(some, key=lambda row: some[row]["tokens_per_second"]) for some in (ours, peers))
    return {
        "row": mine,
        "peer": theirs,
        "speed": ratio(done[mine], done[theirs]),
        "memory": done[mine]["peak_memory_gib"] / done[theirs]["peak_memory_gib"],
        "start": done[mine]["seconds_to_second_step"] / done[theirs]["seconds_to_second_step"],
    }


def cpu_name() -> str:
    """What the processor calls itself."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def table(results: Sequence[dict[str, Any]]) -> str:
    """Results as the documents have them."""
    lines = []
    for result in results:
        on_gpu = result["device"] == "cuda"
        rate = "MFU: full / causal" if on_gpu else "of the products' rate"
        lines += [
            f"**{result['model']}, {result['precision']}**",
            "",
            f"| Row | tokens/s | of plain, same row (half lie in) | {rate} | peak memory, GiB | to 2nd step: cold / warm, s |"
            " losses |",
            "|---|---|---|---|---|---|---|",
        ]
        for row, one in result["rows"].items():
            if "failed" in one:
                lines.append(f"| {row} | failed | | | | | |")
                continue
            against = one.get(f"of_plain.{row.partition('.')[2]}")
            share = f"{one['of_the_products_rate']:.0%}"
            if "mfu" in one:
                share = f"{one['mfu']:.1%} / {one['mfu_causal']:.1%}"
            agree = "agree" if one.get("losses_agree") else f"differ by {one.get('loss_differs', math.nan):.0e}"
            warm = one.get("warm_seconds_to_second_step")
            lines.append(
                f"| {row} | {one['tokens_per_second']:,.0f} | {spread(against) if against else ''} | {share} | "
                f"{one['peak_memory_gib']:.2f} | {one['seconds_to_second_step']:.1f} / "
                f"{f'{warm:.1f}' if warm else 'not measured'} | {agree} |"
            )
        best = against_peers(result["rows"])
        if best:
            lines += [
                "",
                f"{best['row']} against the fastest peer's fastest row, {best['peer']}: {spread(best['speed'])} of its tokens/s, "
                f"{best['memory']:.2f} of its memory, {best['start']:.2f} of its time from start to second step.",
            ]
        lines.append("")
    return "\n".join(lines)


def spread(found: dict[str, float]) -> str:
    """A median, and between what half of all lies."""
    return f"{found['median']:.3f} ({found['low']:.2f} to {found['high']:.2f})"
