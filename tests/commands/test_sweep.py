"""Sweeps: the sweep file and its search space, suggestions, pruning, kills at every point, and the results."""

import json
import math
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from optuna.storages import JournalStorage

from tests.launching import Cli
from titanlike.config import UserError
from titanlike.recipe import PretrainRecipe, load
from titanlike.run.checks import check_recipe
from titanlike.tools.sweep import scheduler
from titanlike.tools.sweep.config import SweepPlan, load_sweep
from titanlike.tools.sweep.results import Trial, rank, read_results, table
from titanlike.tools.sweep.scheduler import Interrupted, Scheduler, TrialRun, run_command, slots
from titanlike.tools.sweep.study import JOURNAL, Study

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "train_configs/debug.toml"
SEARCH = """
[search."optimizer.lr"]
low = 1e-3
high = 1e-1
log = true
[search."optimizer.groups"]
values = [[{pattern = "*"}], [{pattern = "layers", optimizer = "muon"}, {pattern = "*"}]]
[search."schedule.warmup_steps"]
low = 5
high = 40
"""


def sweep_file(folder: Path, text: str = SEARCH, **keys: object) -> Path:
    file = folder / "tiny.toml"
    values = {"recipe": str(RECIPE), "trials": 8, "startup_trials": 4, "dir": str(folder / "runs")} | keys
    file.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()) + text)
    return file


def problem(folder: Path, text: str = SEARCH, overrides: Mapping[str, str] | None = None, **keys: object) -> str:
    with pytest.raises(UserError) as error:
        load_sweep(sweep_file(folder, text, **keys), overrides or {})
    return str(error.value).removeprefix(f"{folder / 'tiny.toml'}: ")


@pytest.mark.parametrize(
    ("search", "message"),
    [
        ('[search."optimizer.lrr"]\nvalues = [0.1]', "search: optimizer.lrr = 0.1: unknown key; did you mean optimizer.lr?"),
        ("[search.optimizer.lr]\nlow = 0.0\nhigh = 1.0", "search: optimizer.lr = 0.0 must be a number > 0"),
        ("[search.optimizer.lr]\nlow = 0.1", '[search."optimizer.lr"]: high is missing; give low and high, or values = [...]'),
        ("[search.run.name]\nvalues = ['a']", '[search."run.name"]: the sweep sets this key for each trial; remove the table'),
        ("", 'there is nothing to search over; add a table such as [search."optimizer.lr"]'),
        (  # each extreme is valid with another value of the other key
            "[search.schedule.warmup_steps]\nlow = 10\nhigh = 100\n[search.training.steps]\nvalues = [50, 200]",
            "search: schedule.warmup_steps = 100, training.steps = 50: schedule.warmup_steps = 100 is more than "
            "training.steps = 50, so the learning rate would not reach its peak; use schedule.warmup_steps = 50 or less, or train "
            "longer",
        ),
        (  # named alone: it works with no value of the other key
            "[search.training.local_batch_size]\nvalues = [5, 8]\n[search.optimizer.lr]\nlow = 0.1\nhigh = 0.2",
            "search: training.local_batch_size = 5 ",
        ),
    ],
)  # fmt: skip
def test_a_mistake_in_the_search_space_is_one_sentence(tmp_path: Path, search: str, message: str) -> None:
    text = problem(tmp_path, search)
    assert text.startswith(message) if message.endswith(" ") else text == message
    assert "\n" not in text


@pytest.mark.parametrize("file", sorted((ROOT / "sweep_configs").glob("*.toml")), ids=lambda file: file.stem)
def test_a_shipped_sweep_is_valid(file: Path) -> None:
    load_sweep(file, {})


def test_trials_share_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = load_sweep(sweep_file(tmp_path), {"resources.gpus_per_trial": "2"})
    three = replace(plan, sweep=replace(plan.sweep, resources=replace(plan.sweep.resources, parallel=3)))
    assert slots(plan) == [{"NPROC": "1", "CUDA_VISIBLE_DEVICES": ""}]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in slots(three)] == [""] * 3
    for module in ("config", "scheduler"):
        monkeypatch.setattr(f"titanlike.tools.sweep.{module}.visible_gpus", lambda: ["0", "1", "2", "3", "4"])
    found = [(one["CUDA_VISIBLE_DEVICES"], one["NPROC"]) for one in slots(plan)]
    assert found == [("0,1", "2"), ("2,3", "2")]
    with pytest.raises(UserError, match="need 6 GPUs, but this machine has 5"):
        slots(three)


# The runs below are replaced by a function of their settings; the scheduler, the storage and the files are real.
STEPS = (20, 40, 60)


class Killed(BaseException):
    """Ends the sweep without a clean-up, like SIGKILL."""


class FakeRun(TrialRun):
    """A run that records one validation at each poll. It resumes after the last one."""

    def __init__(self, plan: SweepPlan, trial: Trial, variables: Mapping[str, str]) -> None:
        number, settings = trial.trial, trial.settings
        self.number, self.started, self.size, self.last_step, self.stop_at = number, 0.0, 0, 0, 0.0
        folder = plan.run_path(number)
        self.file, self.code = folder / "metrics.jsonl", None
        folder.mkdir(parents=True, exist_ok=True)
        distance = abs(math.log(float(settings["optimizer.lr"]) / 1e-2)) + 0.01 * int(settings["schedule.warmup_steps"])
        self.values: list[tuple[int, float | None]] = [(step, 2 + distance + 10 / step) for step in STEPS]
        if number == 3:
            self.values[1] = (40, None)  # diverges
        self.fails = number == 5
        if number == 1 and not self.file.exists():
            self.file.write_text('{"step": 20, "validation_lo\n')  # a damaged line is left out

    def poll(self) -> int | None:
        known = self.file.read_text().count("validation_loss") if self.file.exists() else 0
        if self.code is None and self.fails:
            self.code = 1
        elif self.code is None and known < len(self.values):
            with self.file.open("a") as file:
                file.write(json.dumps(dict(zip(("step", "validation_loss"), self.values[known], strict=True))) + "\n")
        if self.code is None and known >= len(self.values) - 1:  # ends with its last record
            self.code = 0
        return self.code

    def stop(self) -> None:
        self.code = 143

    def kill(self) -> None:
        self.code = -9

    def error(self) -> str:
        return "out of memory (exit code 1)"


def run_fake(plan: SweepPlan, num_slots: int = 1) -> None:
    Scheduler(plan, Study(plan), [{}] * num_slots).run()


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "POLL_INTERVAL", 0.0)
    monkeypatch.setattr(scheduler, "TrialRun", FakeRun)
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.mark.parametrize("stride", [19, pytest.param(1, marks=pytest.mark.every)])
def test_a_sweep_killed_at_every_point_has_the_same_results(tmp_path: Path, fast: None, stride: int) -> None:
    points = 0  # passed since the start of the process

    def kill_at(number: int) -> None:
        nonlocal points
        points += 1
        if points == number:
            raise Killed

    def instrumented(number: int) -> pytest.MonkeyPatch:
        nonlocal points
        points, patch = 0, pytest.MonkeyPatch()
        targets = [(JournalStorage, name) for name in (
            "create_new_trial", "set_trial_intermediate_value", "set_trial_user_attr", "set_trial_state_values",
            "set_study_user_attr",
        )] + [(FakeRun, "poll"), (FakeRun, "stop"), (scheduler, "write_results")]  # fmt: skip
        for owner, name in targets:
            original = getattr(owner, name)

            def replaced(*arguments: object, original: object = original, **keywords: object) -> object:
                kill_at(number)
                result = original(*arguments, **keywords)  # type: ignore[operator]
                kill_at(number)
                return result

            patch.setattr(owner, name, replaced)
        return patch

    plan = load_sweep(sweep_file(tmp_path), {})

    def run(folder: str, number: int) -> bool:
        """Returns whether the sweep was killed."""
        patch = instrumented(number)
        try:
            run_fake(replace(plan, sweep=replace(plan.sweep, dir=str(tmp_path / folder))))
        except Killed:
            return True
        finally:
            patch.undo()
        return False

    assert not run("whole", 0)
    num_points, expected = points, read_results(tmp_path / "whole/tiny")
    assert num_points > 100
    for number in range(1, num_points + 1, stride):
        folder = f"killed-{number}"
        assert run(folder, number)
        run(folder, (number * 7) % num_points + 1)  # the second kill is at another point
        assert not run(folder, 0)
        assert read_results(tmp_path / folder / "tiny") == expected
    states = {trial["trial"]: trial["state"] for trial in expected["trials"]}
    assert states[3] == "pruned" and states[5] == "failed" and "pruned" in [states[n] for n in (4, 6, 7)]


def test_table_reasons_and_the_best_recipe(tmp_path: Path, fast: None, capsys: pytest.CaptureFixture[str]) -> None:
    plan = load_sweep(sweep_file(tmp_path, trials=12), {})
    run_fake(plan)
    results = read_results(plan.path)
    trials = {trial["trial"]: trial for trial in results["trials"]}
    complete = [trial for trial in results["trials"] if trial["state"] == "complete"]
    assert complete == results["trials"][: len(complete)] and len(complete) >= 5
    assert [trial["value"] for trial in complete] == sorted(trial["value"] for trial in complete)
    assert trials[3]["reason"] == "validation_loss of step 40 is not finite" and trials[3]["step"] == 40
    assert trials[5]["reason"] == "out of memory (exit code 1)"
    # The median of the reason is that of the trials that were complete then.
    pruned = next(trial for trial in trials.values() if "median" in trial["reason"])
    earlier = [one for one in complete if one["trial"] < pruned["trial"]]
    own, at_step = pruned["values"], str(pruned["step"])
    median = sorted(one["values"][at_step] for one in earlier)
    middle = (median[(len(median) - 1) // 2] + median[len(median) // 2]) / 2
    assert pruned["reason"] == (
        f"the best validation_loss up to step {at_step}, {min(own.values()):.6g}, is above {middle:.6g}, the median of "
        f"{len(earlier)} complete trials at step {at_step}"
    )
    text = table(results)
    assert text.splitlines()[1].split()[:2] == ["1", str(complete[0]["trial"])]
    assert f"trial {pruned['trial']} pruned: {pruned['reason']}" in text
    # TPE finds better values than the random trials, whose optimum is at 1e-2.
    assert max(results["importance"], key=results["importance"].get) == "optimizer.lr"
    best = load(PretrainRecipe, plan.path / "best.toml")
    check_recipe(best, 1)
    settings = complete[0]["settings"]
    assert repr(best.optimizer.lr) == settings["optimizer.lr"]
    assert len(best.optimizer.groups) == settings["optimizer.groups"].count("pattern")
    capsys.readouterr()
    run_fake(plan)  # complete: starts nothing
    assert capsys.readouterr().out == "" and read_results(plan.path) == results


def test_more_trials_can_be_added_but_another_sweep_is_refused(tmp_path: Path, fast: None) -> None:
    run_fake(load_sweep(sweep_file(tmp_path, trials=2), {}))
    plan = load_sweep(sweep_file(tmp_path), {"trials": "4"})
    with (plan.path / JOURNAL).open("ab") as journal:
        journal.write(b'{"op_code": 4, "wor')  # killed while it wrote
    run_fake(plan)
    assert len(read_results(plan.path)["trials"]) == 4
    with pytest.raises(UserError, match="the trials of a sweep with another seed, search; restore it"):
        Study(load_sweep(sweep_file(tmp_path, SEARCH.replace("40", "41")), {"seed": "1"}))


def test_a_pruned_trial_stays_pruned_and_is_ranked_by_its_step(tmp_path: Path) -> None:
    study = Study(load_sweep(sweep_file(tmp_path, SEARCH), {"pruning.pruner": "none"}))
    for number, step in enumerate((20, 40)):
        study.create_trial()
        records = [{"step": 10, "validation_loss": 1.0}, {"step": step, "validation_loss": None}]
        assert study.report(number, records) == f"validation_loss of step {step} is not finite"
        study.complete(number)  # its run has ended by itself
    assert [(trial.trial, trial.state, trial.step) for trial in rank(study.trials(), "minimize")] == [
        (1, "pruned", 40), (0, "pruned", 20)
    ]  # fmt: skip


@pytest.mark.parametrize(("trials", "started"), [(2, 2), (8, 3)])
def test_the_command_fails_if_all_trials_failed(
    tmp_path: Path, fast: None, monkeypatch: pytest.MonkeyPatch, cli: Cli, trials: int, started: int
) -> None:
    file = sweep_file(tmp_path, trials=trials)
    message = (
        f"error: all {started} trials failed, the last one because: out of memory (exit code 1); correct this, delete "
    )
    with monkeypatch.context() as patch:
        patch.setattr(FakeRun, "poll", lambda self: 1)
        for _ in range(2):  # nothing starts the second time
            output = cli("sweep", file, code=2)
            assert output.err.startswith(message) and "trial 1 failed: out of memory" in output.out
    cli("sweep", tmp_path / "runs/tiny")
    if trials == 2:
        cli("sweep", file, "--trials=3")  # one has succeeded


def test_damaged_files_of_a_sweep_are_named(tmp_path: Path, fast: None) -> None:
    plan = load_sweep(sweep_file(tmp_path, trials=2), {})
    run_fake(plan)
    (plan.path / "sweep.json").write_text("{")
    with pytest.raises(UserError, match=r"sweep.json is damaged; start the sweep again"):
        read_results(plan.path)
    run_fake(plan)
    assert len(read_results(plan.path)["trials"]) == 2
    content = (plan.path / JOURNAL).read_bytes()
    lines = content.splitlines(keepends=True)
    for damage in (b"\0\0\0\n", b"\n", b"{}\n", b"[1]\n", lines[3][:20] + b"\xff\n"):
        (plan.path / JOURNAL).write_bytes(b"".join([*lines[:3], damage, *lines[4:]]))
        with pytest.raises(UserError, match=r"optuna.journal is damaged; restore the file, or delete "):
            Study(plan)


def test_a_signal_stops_the_trials_and_they_resume(tmp_path: Path, fast: None, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = load_sweep(sweep_file(tmp_path), {})
    original = FakeRun.poll

    def interrupt(self: FakeRun) -> int | None:
        if self.file.parent.name == "tiny-001":
            signal.raise_signal(signal.SIGINT)
        return original(self)

    monkeypatch.setattr(FakeRun, "poll", interrupt)
    with pytest.raises(Interrupted) as stopped:
        run_fake(plan)
    assert stopped.value.code == 130
    assert [trial["state"] for trial in read_results(plan.path)["trials"]] == ["complete", "running"]
    monkeypatch.setattr(FakeRun, "poll", original)
    run_fake(plan)
    assert len(read_results(plan.path)["trials"]) == 8


def test_a_run_reports_its_error_and_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = load_sweep(sweep_file(tmp_path), {})
    plan.path.mkdir(parents=True)
    trial = Trial(0, None, {}, 0, "running", "", "tiny-000", {})
    script = "import sys; print('error: no data', file=sys.stderr); print('end'); sys.exit(2)"
    for command in ([sys.executable, "-c", script], ["sleep", "60"]):
        monkeypatch.setattr(scheduler, "run_command", lambda *_, command=command: command)
        run = TrialRun(plan, trial, {})
        if command[0] == "sleep":
            run.stop()
        while run.poll() is None:
            pass
        assert run.poll() == (-signal.SIGTERM if command[0] == "sleep" else 2)
        assert run.error() == ("no output (ended by SIGTERM)" if command[0] == "sleep" else "no data (exit code 2)")


def test_command_line(tmp_path: Path, cli: Cli) -> None:
    file = sweep_file(tmp_path)
    output = cli("sweep", file, "--dry-run", "--trials=5").out
    assert "5 trials, 1 at a time, minimize validation_loss" in output
    assert "optimizer.lr: 0.001 to 0.1, logarithmic" in output and "--run.name=tiny-000" in output
    assert not (tmp_path / "runs").exists()
    message = "error: command line: trals = 5: unknown key; did you mean trials?\n"
    assert cli("sweep", file, "--trals=5", code=2).err == message
    assert "is not the directory of a sweep" in cli("sweep", tmp_path, code=2).err


def test_checkpoints_of_two_sweeps_do_not_collide(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'extends = "{RECIPE}"\n[checkpoint]\ndir = "s3://bucket/runs"\n')
    plan = load_sweep(sweep_file(tmp_path, recipe="recipe.toml"), {})
    assert "--checkpoint.dir=s3://bucket/runs/tiny" in run_command(plan, 0, {"optimizer.lr": "0.1"})
