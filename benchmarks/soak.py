"""Kills one run over and over, at random moments, and holds what came of it against the run that nobody killed.

    python -m benchmarks.soak --kills 110 --out benchmarks/results/soak_cpu.json
    python -m benchmarks.soak --table benchmarks/results/soak_cpu.json                the tables of the documents

Every start is a `./run_train.sh` with the same words, so that it takes the run up from its newest checkpoint. A kill is SIGKILL
for one rank, for all processes or for the launcher, or SIGTERM for the launcher. Some aim at a moment of the start, some at the
reading of a checkpoint, some at any moment of the training, and some at the writing of a checkpoint. What was really hit is told
from the disk and from /proc: this needs Linux.

After each kill every checkpoint that is there must be whole, none may be gone before newer ones replaced it, and every step that
was ever recorded must be, to the last bit, what it is in the undisturbed run. At the end so must every weight and all that the
optimizer keeps. The first difference ends the program with exit code 1, and the folder is left for a look at it.
"""

import argparse
import json
import os
import platform
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.figures import cpu_name
from benchmarks.launches import Start, newest_record
from benchmarks.sameness import Unsound, differences, half_done, hashes, look, recorded
from titanlike.checkpoint.store import name_of
from titanlike.run.run_dir import versions

KEEP = 2
RECIPE = {
    "model.dim": "128", "model.num_layers": "4", "model.num_heads": "2", "model.num_kv_heads": "1", "model.ffn_dim": "384",
    "model.dropout": "0.1", "data.source": "synthetic", "training.seq_len": "32", "training.global_batch_size": "8",
    "training.local_batch_size": "4", "schedule.warmup_steps": "20", "checkpoint.interval": "5", "checkpoint.keep": str(KEEP),
    "validation.interval": "0", "sample.tokens": "0", "metrics.interval": "1", "metrics.tensorboard": "false",
    "run.device": "cpu",
}  # fmt: skip
KINDS = {
    "rank": "one rank, SIGKILL",
    "all": "all processes, SIGKILL",
    "launcher": "the launcher, SIGKILL",
    "term": "the launcher, SIGTERM",
}
AIMS = {"start": 6, "load": 4, "steps": 4, "save": 6}  # of twenty kills
PHASES = {
    "launch": "launcher alone", "start": "ranks starting", "load": "reading a checkpoint", "steps": "between saves",
    "save": "in a save",
}  # fmt: skip
STEPS_PER_KILL = 20
LONGEST = 4.0  # seconds of training before a kill
PATIENCE = 180.0  # seconds in which a start must make its first step, and in which all processes must have ended


@dataclass
class Kill:
    """What one kill hit, and what was there afterwards."""

    kind: str
    aim: str
    phase: str = ""
    after: float = 0.0  # seconds from the start of the processes
    resumed: int | None = None  # step that they went on from, if they came so far
    first_step: float | None = None  # seconds from their start to their first step, if they came so far
    step: int = 0  # their last that was recorded, if they came so far
    saved: int = 0  # step of the newest checkpoint afterwards
    seconds_to_end: float = 0.0  # until no process was left
    ended_by_hand: int = 0  # processes that did not end by themselves
    exit_code: int | None = None
    interrupted: list[str] = field(default_factory=list)  # folders that it left half written, or half deleted

    @property
    def done_again(self) -> int:
        """Steps that the next start has to repeat."""
        return max(0, self.step - self.saved)

    def __str__(self) -> str:
        took = f"first step after {self.first_step:.1f} s, " if self.first_step else ""
        left = f", left {' '.join(self.interrupted)}" if self.interrupted else ""
        return (
            f"{KINDS[self.kind]:<22} {PHASES[self.phase]:<20} after {self.after:5.1f} s: {took}at step {self.step or '-'}, "
            f"saved {self.saved}, ended in {self.seconds_to_end:.1f} s{left}"
        )


class Soak:
    """One run that is killed, and the same undisturbed."""

    def __init__(self, folder: Path, kills: int, ranks: int, seed: int) -> None:
        self.folder, self.num_kills, self.ranks = folder, kills, ranks
        self.killed, self.undisturbed = folder / "killed", folder / "undisturbed"
        self.random = random.Random(seed)
        self.steps = STEPS_PER_KILL * max(kills, 5)
        self.kills: list[Kill] = []
        self.there: list[int] = []  # checkpoints after the last kill
        self.left: dict[str, int] = {}  # what is half done after it
        self.compared = self.cleared = 0

    def run(self) -> dict[str, Any]:
        """All of it, and what came of it."""
        load = [os.getloadavg()[0]]
        self.starts = [self._finish(self.undisturbed)]  # seconds to the first step
        records = [json.loads(line) for line in (self.undisturbed / "metrics.jsonl").read_text().splitlines()]
        self.expected = recorded(self.undisturbed)
        self.step_seconds, self.save_seconds = (
            statistics.median(record[name] for record in records if name in record)
            for name in ("step_seconds", "save_seconds")
        )
        print(
            f"undisturbed: {self.steps} steps, the first after {self.starts[0]:.1f} s, then {self.step_seconds:.3f} s each"
        )
        kinds, aims = self._in_turns(dict.fromkeys(KINDS, 1)), self._in_turns(AIMS)
        for number in range(1, self.num_kills + 1):
            kill = self._kill(next(kinds), next(aims))
            self.kills.append(kill)
            load.append(os.getloadavg()[0])
            print(f"{number:4}  {kill}", flush=True)
        last = self._finish(self.killed)
        self._compare_records()
        self.cleared += len(self.left)
        tensors = len(hashes(self.killed / "checkpoints" / name_of(self.steps)))
        return {
            "usual_seconds": {"step": self.step_seconds, "save": self.save_seconds, "first_step": self.starts[0]},
            "load": {"median": statistics.median(load), "highest": max(load)},
            "last_recovery": last, "records_compared": self.compared, "tensors_compared": tensors,
            "leftovers_cleared": self.cleared, "leftovers": sorted(half_done(self.killed)),
            "differences": differences(self.killed, self.undisturbed),
            "kills": [asdict(kill) | {"done_again": kill.done_again} for kill in self.kills],
        }  # fmt: skip

    def _start(self, run: Path) -> Start:
        keys = RECIPE | {"training.steps": str(self.steps), "run.dir": str(self.folder), "run.name": run.name}
        return Start([f"--{key}={value}" for key, value in keys.items()], run, self.ranks)

    def _finish(self, run: Path) -> float:
        """Let a run come to its end. Seconds to the first step of that start."""
        start = self._start(run)
        try:
            first = self._first_step(start)
            start.until(lambda: False, 3600.0, pause=0.1)
        finally:
            start.end()
        if start.exit_code:
            raise Unsound(f"{run} ended by itself with exit code {start.exit_code}:\n{start.log()}")
        return first

    def _first_step(self, start: Start) -> float:
        start.until(start.first_step, PATIENCE)
        found = start.first_step()
        if found is None:
            raise Unsound(f"no step in {start.seconds:.0f} s, exit code {start.exit_code}:\n{start.log()}")
        return found

    def _kill(self, kind: str, aim: str) -> Kill:
        kill, start = Kill(kind, aim), self._start(self.killed)
        try:
            processes = self._take_aim(start, aim)
            kill.after, kill.first_step = start.seconds, start.first_step()
            if start.exit_code is not None:
                raise Unsound(f"ended by itself with exit code {start.exit_code}:\n{start.log()}")
            self._strike(start, kill, processes)
            struck = time.monotonic()
            while start.processes() and time.monotonic() - struck < PATIENCE:
                time.sleep(0.05)
            kill.seconds_to_end = time.monotonic() - struck
        finally:
            kill.ended_by_hand = start.end()
        kill.exit_code, kill.resumed = start.exit_code, start.resumed()
        self._look_at(kill)
        return kill

    def _take_aim(self, start: Start, aim: str) -> dict[int, bool]:
        """Wait for the moment to kill it. Returns what processes there are: where the moment is short, found before it."""
        if aim == "start":
            start.until(start.first_step, self.random.uniform(0, statistics.median(self.starts[-9:])))
            return start.processes()
        if aim == "load":
            start.until(lambda: len(start.ranks()) == self.ranks, PATIENCE)
            processes = start.processes()
            start.until(
                lambda: start.resumed() is not None or start.reading(self.killed / "checkpoints", list(processes)),
                PATIENCE,
                pause=0.001,
            )
            time.sleep(self.random.uniform(0, 0.05))
        else:
            self.starts.append(self._first_step(start))
            remaining = self.steps - max(self.there, default=0)
            share = 2 * remaining / (self.num_kills - len(self.kills)) * self.step_seconds
            start.until(lambda: False, self.random.uniform(0, min(LONGEST, share)))
            processes = start.processes()
            if aim == "save":
                start.until(lambda: half_done(self.killed).items() - self.left.items(), 10.0, pause=0.001)
                time.sleep(self.random.uniform(0, self.save_seconds / 2))
        return processes

    def _strike(self, start: Start, kill: Kill, processes: dict[int, bool]) -> None:
        """Kill it, and keep what it was about."""
        ranks = [process for process, is_rank in processes.items() if is_rank]
        if kill.kind == "rank" and not ranks:
            kill.kind = "launcher"
        if kill.first_step:
            kill.phase = "save" if half_done(self.killed).items() - self.left.items() else "steps"
        elif ranks:
            kill.phase = "load" if start.reading(self.killed / "checkpoints", ranks) else "start"
        else:
            kill.phase = "launch"
        victims = {"rank": ranks and [self.random.choice(ranks)], "all": list(processes)}
        start.send(
            signal.SIGTERM if kill.kind == "term" else signal.SIGKILL, victims.get(kill.kind, [start.process.pid])
        )

    def _look_at(self, kill: Kill) -> None:
        """What a kill has left behind, when no process is there any more."""
        before, self.there = self.there, look(self.killed, self.there, KEEP)
        kill.saved = max(self.there, default=0)
        if kill.resumed is not None:
            if kill.resumed != max(before, default=0):
                raise Unsound(f"it went on from step {kill.resumed}, but there were checkpoints of {before}")
            last = newest_record(self.killed / "metrics.jsonl")
            kill.step = last if last > kill.resumed else 0
            self._compare_records()
        was_left, self.left = self.left, half_done(self.killed)
        self.cleared += len(was_left.items() - self.left.items())
        kill.interrupted = sorted(name for name, _ in self.left.items() - was_left.items())
        if kill.interrupted and kill.phase == "steps":
            kill.phase = "save"  # it began between our look and the kill
        if kill.ended_by_hand:
            raise Unsound(f"{kill.ended_by_hand} processes were left {PATIENCE:.0f} s after it")

    def _compare_records(self) -> None:
        found = recorded(self.killed)
        self.compared += len(found)
        for step, numbers in found.items():
            if numbers != self.expected.get(step):
                raise Unsound(f"step {step} is recorded with {numbers}, undisturbed {self.expected.get(step)}")

    def _in_turns(self, weights: dict[str, int]) -> Iterator[str]:
        """Names in random order, of each as many as its weight in a round."""
        while True:
            names = [name for name, weight in weights.items() for _ in range(weight)]
            self.random.shuffle(names)
            yield from names


def figures(result: dict[str, Any]) -> dict[str, Any]:
    """What is told of all kills together."""
    kills = result["kills"]
    # Who aims at the start kills the slow ones before they are there: their times would be those of the fast.
    recoveries = [kill["first_step"] for kill in kills[1:] if kill["aim"] in ("steps", "save")] + [
        result["last_recovery"]
    ]
    # The others are told to stop, by their launcher or by its end, and save first.
    unaware = [kill["done_again"] for kill in kills if kill["step"] and kill["kind"] in ("rank", "all")]
    told = [kill for kill in kills if kill["step"] and kill["kind"] in ("term", "launcher")]
    return {
        "kills": len(kills),
        "hit": {kind: dict(Counter(kill["phase"] for kill in kills if kill["kind"] == kind)) for kind in KINDS},
        "recoveries": len(recoveries),
        "seconds_to_recover": _spread(recoveries),
        "killed_in_training": len(unaware),
        "steps_done_again": _spread(unaware),
        "told_to_stop_in_training": len(told),
        "of_them_saved": sum(kill["done_again"] == 0 for kill in told),
        "saves_interrupted": sum(any("removed" not in name for name in kill["interrupted"]) for kill in kills),
        "deletions_interrupted": sum(any("removed" in name for name in kill["interrupted"]) for kill in kills),
    }


def _spread(numbers: list[float]) -> dict[str, float]:
    some = numbers or [0.0]
    return {"median": statistics.median(some), "mean": statistics.fmean(some), "max": max(some)}


def table(result: dict[str, Any]) -> str:
    """The result as the documents have it."""
    found = figures(result)
    lines = ["| Killed | " + " | ".join(PHASES.values()) + " | in all |", "|---|" + "---|" * (len(PHASES) + 1)]
    for kind, name in [*KINDS.items(), ("", "all of them")]:
        hit = found["hit"].get(kind) or Counter(kill["phase"] for kill in result["kills"])
        lines.append(
            f"| {name} | " + " | ".join(str(hit.get(phase, 0)) for phase in PHASES) + f" | {sum(hit.values())} |"
        )
    again, seconds = found["steps_done_again"], found["seconds_to_recover"]
    steps, every = int(result["recipe"]["training.steps"]), result["recipe"]["checkpoint.interval"]
    facts = {
        f"steps done again after a rank or all were killed while training, with a save every {every} steps: mean, most":
        f"{again['mean']:.1f}, {again['max']:.0f}",
        "SIGTERM, or the launcher killed, while training: saved at once":
        f"{found['of_them_saved']} of {found['told_to_stop_in_training']}",
        "saves cut short": str(found["saves_interrupted"]),
        "leftovers cleared by a later save": f"{result['leftovers_cleared']}, none left",
        "checkpoints lost or damaged": "0",  # else there is no result
        f"records of {steps:,} steps that differ from the undisturbed run": f"0 of {result['records_compared']:,} compared",
        "tensors at the end that differ": f"{len(result['differences'])} of {result['tensors_compared']}",
        f"seconds from a start to its first step, {found['recoveries']} recoveries: median, mean, most":
        f"{seconds['median']:.1f}, {seconds['mean']:.1f}, {seconds['max']:.1f}",
        f"load of the {result['machine']['cores']} cores meanwhile, which had other work: median, most":
        f"{result['load']['median']:.0f}, {result['load']['highest']:.0f}",
    }  # fmt: skip
    return "\n".join(
        [*lines, "", "| What | |", "|---|---|", *(f"| {what} | {value} |" for what, value in facts.items())]
    )


def main() -> None:
    """Kill, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--folder", type=Path, help="where to train; by default a temporary folder, which goes if all is well"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, help="print the tables of this result, and kill nothing")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(json.loads(arguments.table.read_text())))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of what ends the processes
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    soak = Soak(folder.absolute(), arguments.kills, arguments.ranks, arguments.seed)
    result = {
        "command": " ".join(["python", "-m", "benchmarks.soak", *sys.argv[1:]]), "date": time.strftime("%Y-%m-%d"),
        "machine": {"cpu": cpu_name(), "cores": len(os.sched_getaffinity(0)), "platform": platform.platform()},
        "versions": versions(), "ranks": arguments.ranks, "seed": arguments.seed,
        "recipe": RECIPE | {"training.steps": str(soak.steps)},
    }  # fmt: skip
    try:
        result |= soak.run()
    except Unsound as unsound:
        print(f"UNSOUND after {len(soak.kills)} kills: {unsound}\nleft as it is: {folder}", file=sys.stderr)
        sys.exit(1)
    result["figures"] = figures(result)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    if result["differences"]:
        print(f"DIFFERENT: {', '.join(result['differences'])}\nleft as it is: {folder}", file=sys.stderr)
        sys.exit(1)
    if not arguments.folder:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
