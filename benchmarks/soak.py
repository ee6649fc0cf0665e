"""Fault-injection soak test: disturbs and kills runs at random times, and compares them with undisturbed runs.

    python -m benchmarks.soak --hours 2 --ranks 4 --seed 1 --out benchmarks/results/soak_cpu.json
    python -m benchmarks.soak --table benchmarks/results/soak_cpu.json                prints the tables of benchmarks/LOG.md

There are three runs: with checkpoints on a local disk, with checkpoints on S3, which moto emulates, and with another layout at each
start. All starts of a run are the same `./run_train.sh` command but for the layout, and resume from the newest checkpoint. Each
start ends with a kill: SIGKILL to one rank, to all processes or to the launcher, or SIGTERM to the launcher. It is aimed at the
start of the processes, at loading a checkpoint, at training, or at saving a checkpoint. The phase that was hit is determined from
the disk and from /proc, which requires Linux. Before kills during training and saving, the run is disturbed by what it should
survive: a rank that is stopped for a while, a full disk, a store that is slow or refuses connections. At some steps all gradients
are NaN, as in the undisturbed run, and the clock jumps (`benchmarks/soak_program.py`).

After each kill, every checkpoint must be valid, none may be missing before newer ones replaced it, and every recorded step must be
bit-identical to that of the undisturbed run; under changing layouts, the loss is close to it. At the end, so must all weights and
the optimizer state. The undisturbed run must hold as much memory, and as many threads and files, late as early. The first fault
ends the program with exit code 1, and its directory is kept.
"""

import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, facts, parser_of, write
from benchmarks.comparison import RunCorrupt, differences, hashes, incomplete_directories, recorded_steps, verify_run
from benchmarks.launches import Start, newest_record
from benchmarks.soak_faults import Store, Usage, disturb, growth, store, usage
from benchmarks.soak_scenarios import AIMS, KINDS, PHASES, SCENARIOS, Scenario
from benchmarks.soak_tables import figures, table
from titanlike.checkpoint.files import name_of

KEEP = 2
RECIPE = {
    "program": str(ROOT / "benchmarks/soak_program.py"), "training.non_finite": "skip",
    "model.name": "gpt", "model.dim": "128", "model.num_layers": "4", "model.num_heads": "2",
    "data.source": "synthetic", "training.seq_len": "32", "training.global_batch_size": "8",
    "training.local_batch_size": "2", "optimizer.lr": "3e-4", "optimizer.groups": "[]",
    "schedule.warmup_steps": "20", "checkpoint.interval": "5", "checkpoint.keep": str(KEEP),
    "validation.interval": "0", "sample.tokens": "0", "metrics.interval": "1", "metrics.trackers": "[]",
    "run.device": "cpu",
}  # fmt: skip
TOLERANCE = 2e-3  # of the loss under another layout
STEPS_PER_KILL = 10
SECONDS_PER_KILL = 20.0  # shortest, so that the kills last for all of --hours
MEMORY_GROWTH = 0.05  # of the memory of a process, between its second and its last quarter
MAX_TRAINING = 4.0  # seconds from the first step to a kill
TIMEOUT = 180.0  # seconds until the first step of a start, and until all processes have exited after a kill


@dataclass
class Kill:
    """A kill, and the state of the run afterwards."""

    kind: str
    aim: str
    phase: str = ""
    after: float = 0.0  # seconds since the start of the processes
    resumed: int | None = None  # step that they resumed from, if they got that far
    first_step: float | None = None  # seconds from the start to the first step, if they got that far
    step: int = 0  # last one recorded, if they got that far
    saved: int = 0  # step of the newest checkpoint
    seconds_to_end: float = 0.0  # until all processes had exited
    still_running: int = 0  # processes that did not exit by themselves
    exit_code: int | None = None
    interrupted: list[str] = field(default_factory=list)  # directories that were being written or deleted
    disturbances: list[str] = field(default_factory=list)  # before the kill
    layout: str = ""

    @property
    def repeated_steps(self) -> int:
        """Number of steps that the next start repeats."""
        return max(0, self.step - self.saved)

    def __str__(self) -> str:
        started = f"first step after {self.first_step:.1f} s, " if self.first_step else ""
        interrupted = f", interrupted {' '.join(self.interrupted)}" if self.interrupted else ""
        return (
            f"{KINDS[self.kind]:<22} {PHASES[self.phase]:<20} after {self.after:5.1f} s: {started}at step {self.step or '-'}, "
            f"saved {self.saved}, ended in {self.seconds_to_end:.1f} s{interrupted}"
            f"{'; ' * bool(self.layout or self.disturbances)}{', '.join(filter(None, [self.layout, *self.disturbances]))}"
        )


class Soak:
    """A run that is disturbed and killed repeatedly, and the same run undisturbed."""

    def __init__(
        self,
        scenario: Scenario,
        folder: Path,
        kills: int,
        ranks: int,
        seed: int,
        seconds: float,
        remote: Store | None = None,
    ) -> None:
        """There are at most `kills` kills, and none after `seconds` from the first one."""
        self.scenario, self.remote, self.seconds = scenario, remote, seconds
        self.folder, self.num_kills, self.ranks, self.seed = folder, kills, ranks, seed
        self.killed, self.undisturbed = folder / "killed", folder / "undisturbed"
        self.random = random.Random(f"{seed} {scenario.name}")
        self.steps = STEPS_PER_KILL * max(kills, 5)
        self.usage: dict[int, list[Usage]] = {}  # of the ranks of the undisturbed run
        self.largest_difference = 0.0  # of a loss, under other layouts
        self.kills: list[Kill] = []
        self.checkpoints: list[int] = []  # steps, after the last kill
        self.incomplete: dict[str, int] = {}  # directories, after the last kill
        self.num_compared = self.num_cleared = 0

    def run(self) -> dict[str, Any]:
        """Runs everything. Returns the result."""
        load = [os.getloadavg()[0]]
        self.starts = [self._finish(self.undisturbed)]  # seconds to the first step of each start
        held = growth(self.usage)
        _check_growth(held)
        records = [json.loads(line) for line in (self.undisturbed / "metrics.jsonl").read_text().splitlines()]
        self.expected = recorded_steps(self.undisturbed)
        self.step_seconds, self.save_seconds = (
            statistics.median(record[name] for record in records if name in record)
            for name in ("step_seconds", "save_seconds")
        )
        print(
            f"{self.scenario.name}, undisturbed: {self.steps} steps, the first after {self.starts[0]:.1f} s, then "
            f"{self.step_seconds:.3f} s per step"
        )
        end = time.monotonic() + self.seconds
        kinds, aims = self._shuffled_rounds(dict.fromkeys(KINDS, 1)), self._shuffled_rounds(AIMS)
        for number in range(1, self.num_kills + 1):
            if time.monotonic() > end:
                break
            kill = self._kill(next(kinds), next(aims))
            self.kills.append(kill)
            load.append(os.getloadavg()[0])
            print(f"{number:4}  {kill}", flush=True)
        last = self._finish(self.killed)
        self._compare_records()
        self.num_cleared += len(self.incomplete)
        self._copy_from_store(self.killed)
        self._copy_from_store(self.undisturbed)
        tensors = len(hashes(self.killed / "checkpoints" / name_of(self.steps)))
        different = differences(self.killed, self.undisturbed) if self.scenario.is_exact else []
        return {
            "name": self.scenario.name, "steps": self.steps, "held": held, "largest_difference": self.largest_difference,
            "usual_seconds": {"step": self.step_seconds, "save": self.save_seconds, "first_step": self.starts[0]},
            "load": {"median": statistics.median(load), "highest": max(load)},
            "last_recovery": last, "records_compared": self.num_compared, "tensors_compared": tensors,
            "leftovers_cleared": self.num_cleared, "leftovers": sorted(incomplete_directories(self.killed)),
            "differences": different,
            "kills": [asdict(kill) | {"repeated_steps": kill.repeated_steps} for kill in self.kills],
        }  # fmt: skip

    def _start(self, run: Path, layout: Mapping[str, int] | None = None) -> Start:
        keys = RECIPE | dict(self.scenario.recipe)
        keys |= {"training.steps": str(self.steps), "run.dir": str(self.folder), "run.name": run.name}
        keys |= {f"parallelism.{name}": str(size) for name, size in (layout or {}).items()}
        variables = {"SOAK_SEED": str(self.seed)} | (self.remote.variables if self.remote else {})
        if run == self.killed:
            variables["SOAK_CLOCK"] = "1"
        return Start([f"--{key}={value}" for key, value in keys.items()], run, self.ranks, variables)

    def _copy_from_store(self, run: Path) -> None:
        """Copies the checkpoints to where they are without a store."""
        if self.remote:
            self.remote.copy(run.name, run / "checkpoints")

    def _finish(self, run: Path) -> float:
        """Starts a run and waits for it to complete. Returns the seconds to its first step."""
        start = self._start(run)
        try:
            first = self._first_step(start)
            start.until(lambda: self._sample(start) if run == self.undisturbed else False, 7200.0, pause=1.0)
        finally:
            start.end()
        if start.exit_code:
            raise RunCorrupt(f"{run} failed with exit code {start.exit_code}:\n{start.log()}")
        return first

    def _sample(self, start: Start) -> None:
        """Records what each rank holds."""
        for rank in start.ranks():
            if found := usage(rank):
                self.usage.setdefault(rank, []).append(found)

    def _first_step(self, start: Start) -> float:
        start.until(start.first_step, TIMEOUT)
        seconds = start.first_step()
        if seconds is None:
            raise RunCorrupt(f"no step within {start.seconds:.0f} s, exit code {start.exit_code}:\n{start.log()}")
        return seconds

    def _kill(self, kind: str, aim: str) -> Kill:
        layout = self.random.choice(self.scenario.layouts)
        kill = Kill(kind, aim, layout=" ".join(f"{name} {size}" for name, size in layout.items()))
        start = self._start(self.killed, layout)
        try:
            processes = self._wait_for(start, aim, kill)
            kill.after, kill.first_step = start.seconds, start.first_step()
            if start.exit_code is not None:
                raise RunCorrupt(f"the run exited before the kill with exit code {start.exit_code}:\n{start.log()}")
            self._send_kill(start, kill, processes)
            killed = time.monotonic()
            while start.processes() and time.monotonic() - killed < TIMEOUT:
                time.sleep(0.05)
            kill.seconds_to_end = time.monotonic() - killed
        finally:
            kill.still_running = start.end()
        if kill.still_running:
            raise RunCorrupt(
                f"{kill.still_running} processes were running {TIMEOUT:.0f} s after this kill:\n{kill}\n{start.log()}"
            )
        kill.exit_code, kill.resumed = start.exit_code, start.resumed()
        self._verify(kill)
        return kill

    def _wait_for(self, start: Start, aim: str, kill: Kill) -> dict[int, bool]:
        """Waits for the time of the kill. Returns the processes, listed before where the phase is short."""
        if aim == "start":
            start.until(start.first_step, self.random.uniform(0, statistics.median(self.starts[-9:])))
            return start.processes()
        if aim == "load":
            start.until(lambda: len(start.ranks()) == self.ranks, TIMEOUT)
            processes = start.processes()
            start.until(
                lambda: start.resumed() is not None or start.reading(self.killed / "checkpoints", list(processes)),
                TIMEOUT,
                pause=0.001,
            )
            time.sleep(self.random.uniform(0, 0.05))
        else:
            self.starts.append(self._first_step(start))
            for kind in self.scenario.disturbances:
                if self.random.random() < 0.5 and start.exit_code is None:
                    disturb(kind, start, self.remote, self.random)
                    kill.disturbances.append(kind)
            remaining = self.steps - max(self.checkpoints, default=0)
            share = 2 * remaining / (self.num_kills - len(self.kills)) * self.step_seconds
            start.until(lambda: False, self.random.uniform(0, min(MAX_TRAINING, share)))
            processes = start.processes()
            if aim == "save" and not self.remote:  # a store has no directories that are renamed
                start.until(
                    lambda: incomplete_directories(self.killed).items() - self.incomplete.items(), 10.0, pause=0.001
                )
                time.sleep(self.random.uniform(0, self.save_seconds / 2))
        return processes

    def _send_kill(self, start: Start, kill: Kill, processes: dict[int, bool]) -> None:
        """Determines the phase, and sends the signal."""
        ranks = [process for process, is_rank in processes.items() if is_rank]
        if kill.kind == "rank" and not ranks:
            kill.kind = "launcher"
        if kill.first_step:
            kill.phase = "save" if incomplete_directories(self.killed).items() - self.incomplete.items() else "steps"
        elif ranks:
            kill.phase = "load" if start.reading(self.killed / "checkpoints", ranks) else "start"
        else:
            kill.phase = "launch"
        victims = {"rank": ranks and [self.random.choice(ranks)], "all": list(processes)}
        start.send(
            signal.SIGTERM if kill.kind == "term" else signal.SIGKILL, victims.get(kill.kind, [start.process.pid])
        )

    def _verify(self, kill: Kill) -> None:
        """Verifies the state of the run after a kill."""
        self._copy_from_store(self.killed)
        before, self.checkpoints = self.checkpoints, verify_run(self.killed, self.checkpoints, KEEP)
        kill.saved = max(self.checkpoints, default=0)
        if kill.resumed is not None:
            if kill.resumed != max(before, default=0):
                raise RunCorrupt(f"the run resumed from step {kill.resumed}, but had checkpoints of steps {before}")
            last = newest_record(self.killed / "metrics.jsonl")
            kill.step = last if last > kill.resumed else 0
            self._compare_records()
        incomplete_before, self.incomplete = self.incomplete, incomplete_directories(self.killed)
        self.num_cleared += len(incomplete_before.items() - self.incomplete.items())
        kill.interrupted = sorted(name for name, _ in self.incomplete.items() - incomplete_before.items())
        if kill.interrupted and kill.phase == "steps":
            kill.phase = "save"  # it began between the determination of the phase and the kill

    def _compare_records(self) -> None:
        recorded = recorded_steps(self.killed)
        self.num_compared += len(recorded)
        for step, values in recorded.items():
            expected = self.expected[step]
            if not self.scenario.is_exact:
                difference = abs(values[0] - expected[0])
                self.largest_difference = max(self.largest_difference, difference)
                if difference < TOLERANCE:
                    continue
            if values != expected:
                raise RunCorrupt(f"step {step} has the record {values}, undisturbed {expected}")

    def _shuffled_rounds(self, weights: dict[str, int]) -> Iterator[str]:
        """Yields names in random order; in each round, each name as often as its weight."""
        while True:
            names = [name for name, weight in weights.items() for _ in range(weight)]
            self.random.shuffle(names)
            yield from names


def _check_growth(held: dict[str, dict[str, float]]) -> None:
    """Raises `RunCorrupt` if processes hold more late than early."""
    for name, found in held.items():
        allowed = MEMORY_GROWTH * found["early"] if name == "memory_mib" else 0
        if found["largest_growth"] > allowed:
            raise RunCorrupt(f"a process of the undisturbed run holds more {name} late than early: {found}")


def main() -> None:
    """Runs the soak test, or prints the tables of a result."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--hours", type=float, default=0.5, help="time for all three runs, without the undisturbed ones"
    )
    parser.add_argument("--kills", type=int, help="kills of each run at most; by default what the time allows")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", default=",".join(each.name for each in SCENARIOS), help="names separated by commas")
    parser.add_argument(
        "--folder", type=Path, help="directory of the runs; by default a temporary directory, deleted on success"
    )
    parser.add_argument("--table", type=Path, help="print the tables of this result and exit")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(json.loads(arguments.table.read_text())))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs the cleanup that ends the processes
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    result: dict[str, Any] = facts() | {
        "ranks": arguments.ranks, "seed": arguments.seed, "recipe": RECIPE | {"program": "benchmarks/soak_program.py"}, "runs": [],
    }  # fmt: skip
    seconds = arguments.hours * 3600 / len(SCENARIOS)
    for scenario in (each for each in SCENARIOS if each.name in arguments.runs.split(",")):
        kills = arguments.kills or max(int(seconds / SECONDS_PER_KILL), 1)
        place = folder.absolute() / scenario.name.replace(" ", "-")
        place.mkdir(parents=True, exist_ok=True)
        with store() if "checkpoint.dir" in scenario.recipe else nullcontext() as remote:
            soak = Soak(scenario, place, kills, arguments.ranks, arguments.seed, seconds, remote)
            try:
                found = soak.run()
            except RunCorrupt as error:
                print(f"FAILED after {len(soak.kills)} kills: {error}\nfiles kept in {folder}", file=sys.stderr)
                sys.exit(1)
        if found["differences"]:
            print(f"DIFFERENT: {', '.join(found['differences'])}\nfiles kept in {folder}", file=sys.stderr)
            sys.exit(1)
        result["runs"].append(found | {"figures": figures(found)})
        write(arguments.out, result)
    print(table(result))
    if not arguments.folder:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
