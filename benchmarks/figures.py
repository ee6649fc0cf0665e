"""Throughput, memory and loss comparisons from the raw results of `benchmarks/run.py`, and their tables."""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.common import table as table_of
from benchmarks.models import MODELS, config_of
from titanlike.hardware.files import file_of_device, peak_flops

COMPARED_STEPS = 20
TOLERANCES = {"float32": 1e-3, "bfloat16": 2e-2, "float8": 5e-2}  # relative, of a loss from plain's


def figures(result: dict[str, Any], results: dict[str, dict[str, Any]], run: dict[str, Any]) -> dict[str, Any]:
    """Returns a row's raw result with its throughput and its comparison with plain's rows of the same run."""
    if "failed" in result:
        return result
    tokens = run["tokens_per_step"] * run["block"]
    rate = statistics.median(tokens / seconds for seconds in result["blocks"])
    row_figures = result | {"tokens_per_second": rate, "losses": result["losses"][:COMPARED_STEPS]}
    for row, other in results.items():
        if row.startswith("plain.") and "failed" not in other:
            row_figures[f"relative_to_{row}"] = ratio(result, other)
            pairs = zip(row_figures["losses"], other["losses"], strict=False)
            worst = max(abs(a - b) / (abs(b) or 1.0) for a, b in pairs)  # all losses of a null GPU are 0
            row_figures["max_loss_difference"] = min(worst, row_figures.get("max_loss_difference", worst))
            row_figures["losses_match"] = row_figures["max_loss_difference"] <= TOLERANCES[run["precision"]]
    model = MODELS[run["model"]]
    config, length = config_of(model), model.seq_len
    full = config.flops_per_token(length)
    causal = (full + config.flops_per_token(0)) / 2  # a causal mask keeps half of the attention scores
    row_figures["fraction_of_matmul_rate"] = rate * full / run["matmul_flops_per_second"]
    peak = peak_flops(file_of_device(result["device"]))
    if peak:
        row_figures |= {"mfu": rate * full / peak, "mfu_causal": rate * causal / peak}
    return row_figures


def ratio(result: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Returns the speed relative to another result: median and interquartile range over blocks that ran next to each other."""
    ratios = sorted(b / a for a, b in zip(result["blocks"], other["blocks"], strict=False))
    quarter = len(ratios) // 4
    return {
        "median": statistics.median(ratios),
        "low": ratios[quarter],
        "high": ratios[-1 - quarter],
    }


def against_peers(rows: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Compares titanlike's fastest row with the fastest row of any peer: speed, memory, time to the second step."""
    done = {row: result for row, result in rows.items() if "failed" not in result}
    titanlike = {row: result for row, result in done.items() if row.startswith("titanlike.")}
    peers = {
        row: result
        for row, result in done.items()
        if not row.startswith(("titanlike.", "plain.")) and result.get("losses_match")
    }
    if not titanlike or not peers:
        return None
    best, peer = (max(group, key=lambda row: group[row]["tokens_per_second"]) for group in (titanlike, peers))
    return {
        "row": best,
        "peer": peer,
        "speed": ratio(done[best], done[peer]),
        "memory": done[best]["peak_memory_gib"] / done[peer]["peak_memory_gib"],
        "start": done[best]["seconds_to_second_step"] / done[peer]["seconds_to_second_step"],
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """Returns the tables of the documentation."""
    lines = []
    for result in results:
        fractions = "MFU: full / causal" if result["device"] == "cuda" else "of matmul rate"
        heads = (
            "Row", "tokens/s", "relative to plain (IQR)", fractions, "peak memory, GiB", "time to 2nd step: cold / warm, s",
            "losses",
        )  # fmt: skip
        rows = []
        for row, one in result["rows"].items():
            if "failed" in one:
                rows.append((row, one.get("skipped", "failed"), *[""] * 5))
                continue
            relative = one.get(f"relative_to_plain.{row.partition('.')[2]}")
            fraction = f"{one['fraction_of_matmul_rate']:.0%}"
            if "mfu" in one:
                fraction = f"{one['mfu']:.1%} / {one['mfu_causal']:.1%}"
            losses = "match" if one.get("losses_match") else "not compared"
            if one.get("losses_match") is False:
                losses = f"differ by {one['max_loss_difference']:.0e}"
            warm = one.get("warm_seconds_to_second_step")
            start = f"{one['seconds_to_second_step']:.1f} / {f'{warm:.1f}' if warm else 'not measured'}"
            cells = (
                format_ratio(relative) if relative else "",
                fraction,
                f"{one['peak_memory_gib']:.2f}",
                start,
                losses,
            )
            rows.append((row, f"{one['tokens_per_second']:,.0f}", *cells))
        lines += [f"**{result['model']}, {result['precision']}**\n", table_of(heads, rows)]
        best = against_peers(result["rows"])
        if best:
            lines += [
                "",
                f"{best['row']} relative to the fastest peer, {best['peer']}: {format_ratio(best['speed'])} tokens/s, "
                f"{best['memory']:.2f} peak memory, {best['start']:.2f} time to the second step.",
            ]
        lines.append("")
    return "\n".join(lines)


def joined(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the rows of several results of a model as one, each with its options in its name."""
    rows = {}
    for result in results:
        for row, one in result["rows"].items():
            options = (f", {key} = {value}" for key, value in result["options"].get(row, {}).items())
            rows["".join([row, *options])] = one
    return results[0] | {"rows": rows}


def format_ratio(found: dict[str, float]) -> str:
    """Returns the median and the interquartile range as text."""
    return f"{found['median']:.3f} ({found['low']:.2f} to {found['high']:.2f})"
