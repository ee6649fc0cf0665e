"""Statistics of the soak test, and the tables of docs/results.md."""

import statistics
from collections import Counter
from typing import Any

from benchmarks.common import table as table_of
from benchmarks.soak_scenarios import KINDS, PHASES, SCENARIOS


def figures(result: dict[str, Any]) -> dict[str, Any]:
    """Returns statistics of all kills of a run."""
    kills = result["kills"]
    # Kills aimed at the start hit slow starts more often: their times would be biased towards fast ones.
    recoveries = [kill["first_step"] for kill in kills[1:] if kill["aim"] in ("steps", "save")] + [
        result["last_recovery"]
    ]
    # After other kills, the ranks are signalled by the launcher or notice its death, and save before they exit.
    abrupt = [kill["repeated_steps"] for kill in kills if kill["step"] and kill["kind"] in ("rank", "all")]
    graceful = [kill for kill in kills if kill["step"] and kill["kind"] in ("term", "launcher")]
    return {
        "kills": len(kills),
        "recoveries": len(recoveries),
        "seconds_to_recover": _summary(recoveries),
        "killed_in_training": len(abrupt),
        "repeated_steps": _summary(abrupt),
        "stopped_in_training": len(graceful),
        "stopped_and_saved": sum(kill["repeated_steps"] == 0 for kill in graceful),
        "saves_interrupted": sum(any("removed" not in name for name in kill["interrupted"]) for kill in kills),
        "deletions_interrupted": sum(any("removed" in name for name in kill["interrupted"]) for kill in kills),
    }


def _summary(numbers: list[float]) -> dict[str, float]:
    values = numbers or [0.0]
    return {"median": statistics.median(values), "mean": statistics.fmean(values), "max": max(values)}


def table(result: dict[str, Any]) -> str:
    """Returns the tables of docs/results.md."""
    runs = result["runs"]
    kills = [kill for run in runs for kill in run["kills"]]
    rows = []
    for kind, name in [*KINDS.items(), ("", "total")]:
        hit = Counter(kill["phase"] for kill in kills if kind in ("", kill["kind"]))
        rows.append((name, *(hit.get(phase, 0) for phase in PHASES), sum(hit.values())))
    columns = [_facts(run) for run in runs]
    facts = table_of(
        ("", *(run["name"] for run in runs)), ((fact, *(column[fact] for column in columns)) for fact in columns[0])
    )
    median = statistics.median(run["load"]["median"] for run in runs)
    load = f"{median:.0f}, {max(run['load']['highest'] for run in runs):.0f}"
    kills_by_phase = table_of(("Killed", *PHASES.values(), "total"), rows)
    return "\n\n".join(
        [kills_by_phase, facts, f"Load of the {result['machine']['cores']} cores: median and maximum {load}."]
    )


def _facts(run: dict[str, Any]) -> dict[str, str]:
    found, held = run["figures"], run["held"]
    repeated, seconds = found["repeated_steps"], found["seconds_to_recover"]
    disturbances = Counter(name for kill in run["kills"] for name in kill["disturbances"])
    exact = next(scenario.is_exact for scenario in SCENARIOS if scenario.name == run["name"])
    return {
        "steps; kills": f"{run['steps']:,}; {found['kills']}",
        "disturbances": ", ".join(f"{number} {name}" for name, number in sorted(disturbances.items())) or "none",
        "steps repeated after SIGKILL to one or all ranks: mean, maximum":
        f"{repeated['mean']:.1f}, {repeated['max']:.0f}",
        "saved before exit after SIGTERM or the death of the launcher":
        f"{found['stopped_and_saved']} of {found['stopped_in_training']}",
        "checkpoints lost or corrupt": "0",  # otherwise there is no result
        "records compared with the undisturbed run": f"{run['records_compared']:,}",
        "records that differ": "0" if exact else f"losses by {run['largest_difference']:.1e} at most",
        "tensors that differ at the end":
        f"{len(run['differences'])} of {run['tensors_compared']}" if exact else "not compared",
        "seconds to the first step after a kill: median, maximum": f"{seconds['median']:.1f}, {seconds['max']:.1f}",
        **{
            f"{label} of a process, early and late": f"{held[name]['early']:.0f}, {held[name]['late']:.0f}"
            for name, label in (("memory_mib", "MiB"), ("threads", "threads"), ("files", "open files"))
            if name in held
        },
    }  # fmt: skip
