"""`./run_train.sh` as a user runs it: real processes, real launchers, and what they leave behind."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.launching import ROOT, SMALL, command, descendants, environment, losses, records, run, start, wait_for


class Debug(NamedTuple):
    """The debug recipe as it is but for its length, in one process."""

    folder: Path
    said: str
    imported: set[str]


@pytest.fixture(scope="module")
def debug(tmp_path_factory: pytest.TempPathFactory) -> Debug:
    folder = tmp_path_factory.mktemp("debug")
    overrides = {"training.steps": "20", "metrics.interval": "1", "validation.interval": "10", "sample.tokens": "8"}
    done = run(folder, real=True, variables={"PYTHONPROFILEIMPORTTIME": "1"}, **overrides)
    assert done.returncode == 0, done.stderr
    (made,) = (folder / "runs").iterdir()
    lines = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")]
    return Debug(made, done.stdout, set(lines))


def test_the_debug_recipe_learns_and_leaves_all_that_a_run_leaves(debug: Debug) -> None:
    folder, said, _ = debug
    found = losses(folder)
    assert list(found) == list(range(1, 21))
    assert found[20] < found[1] - 2.0  # from ln(320) = 5.8 to below 3.8
    validation = [record["validation_loss"] for record in records(folder) if "validation_loss" in record]
    assert len(validation) == 2
    assert validation[1] < validation[0] < found[1]
    assert all(record["tokens_per_second"] > 0 for record in records(folder) if "loss" in record)
    assert {path.name for path in folder.iterdir()} == {
        "recipe.toml", "environment.json", "metrics.jsonl", "tensorboard", "checkpoints", "lock",
    }  # fmt: skip
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"latest", "step-00000020"}
    facts = json.loads((folder / "environment.json").read_text())
    assert {"torch", "python", "device", "git_commit", "host", "command"} <= facts.keys()
    assert "sample after 20 steps:\ndef " in said
    assert said.splitlines()[-1] == f"done: runs/{folder.name}"


def test_one_process_imports_only_what_it_uses(debug: Debug) -> None:
    assert {"torch", "pydantic", "torch.utils.tensorboard"} <= debug.imported
    for costly in (
        "torch._dynamo",
        "torch._inductor",
        "torch.distributed.tensor",
        "torch.distributed.fsdp",
        "sympy",
        "torchao",
    ):
        assert costly not in debug.imported


def test_the_first_line_is_there_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit(7)")
    words = [sys.executable, "-c", f"import sys, runpy; sys.path.insert(0, {str(tmp_path)!r}); sys.argv = sys.argv[1:]; "
             "runpy.run_path(sys.argv[0], run_name='__main__')", str(ROOT / "recipes/pretrain.py")]  # fmt: skip
    done = subprocess.run(
        words, cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True, check=False
    )
    assert done.returncode == 7
    assert re.fullmatch(r"run     runs/debug-\d{8}-\d{6}-\w{4}\n", done.stdout)


def test_two_processes_give_the_losses_of_one(debug: Debug, tmp_path: Path) -> None:
    overrides = {"training.steps": "5", "metrics.interval": "1", "validation.interval": "0", "sample.tokens": "8"}
    done = run(tmp_path, variables={"NPROC": "2"}, real=True, **overrides)
    assert done.returncode == 0, done.stderr
    (made,) = (tmp_path / "runs").iterdir()
    assert "ranks   2 on cpu;" in done.stdout
    assert "          shard        2  shares of weights, gradients and optimizer state\n" in done.stdout
    assert done.stdout.count("step      5/5  loss") == 1  # one of them speaks
    first = {step: loss for step, loss in losses(debug.folder).items() if step <= 5}  # the learning rate still rises
    assert losses(made) == pytest.approx(first, rel=1e-4)


def test_the_resolved_recipe_finds_its_folder_again_and_that_it_is_done(debug: Debug, tmp_path: Path) -> None:
    """From another working directory, after the folder was moved and renamed."""
    moved = tmp_path / "elsewhere" / "renamed"
    shutil.copytree(debug.folder, moved)
    (tmp_path / "here").mkdir()
    before = losses(moved)
    done = run(tmp_path / "here", "../elsewhere/renamed/recipe.toml")
    assert done.returncode == 0, done.stderr
    assert "resumed at step 20\n" in done.stdout
    assert losses(moved) == before
    assert not list((tmp_path / "here").iterdir())
    fresh = run(tmp_path / "here", "../elsewhere/renamed/recipe.toml", "--run.name=fresh", *few_steps())
    assert fresh.returncode == 0, fresh.stderr
    assert "resumed" not in fresh.stdout


def few_steps() -> list[str]:
    return ["--training.steps=2", "--sample.tokens=0", "--validation.interval=0"]


def test_starts_within_one_second_are_two_runs(tmp_path: Path) -> None:
    both = [start(tmp_path, **SMALL) for _ in range(2)]
    for one in both:
        _, errors = one.communicate(timeout=60)
        assert one.returncode == 0, errors
    assert [len(losses(folder)) for folder in (tmp_path / "runs").iterdir()] == [6, 6]


def test_the_library_beside_the_script_runs_whatever_lies_around(tmp_path: Path) -> None:
    for name in ("tomli.py", "glob.py", "titanlike.py", "main.py"):
        (tmp_path / name).write_text("raise SystemExit('the wrong module')")
    (tmp_path / "link").symlink_to(ROOT / "run_train.sh")
    done = subprocess.run(
        [str(tmp_path / "link"), "--check", "1"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("seconds", [0.5, 1.0, 2.0])
def test_ctrl_c_at_the_start_is_quiet(tmp_path: Path, seconds: float) -> None:
    running = start(tmp_path, real=True, **SMALL | {"training.steps": "100000"})
    time.sleep(seconds)
    os.killpg(running.pid, signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode in (130, -signal.SIGINT)
    assert "Traceback" not in errors


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_killed_after_step_25_ends_as_if_it_had_not_been(tmp_path: Path, processes: int) -> None:
    variables = {"NPROC": str(processes)}
    # Steps long enough for the kill to fall between the save at 25 and the end.
    options = SMALL | {"training.steps": "40", "checkpoint.interval": "25", "training.seq_len": "128"}
    whole = run(tmp_path, variables=variables, **options | {"run.name": "whole"})
    assert whole.returncode == 0, whole.stderr

    killed = start(tmp_path, variables, **options | {"run.name": "killed"})
    wait_for(tmp_path / "runs/killed/checkpoints/step-00000025")
    for process in descendants(killed.pid):  # torchrun gives its workers sessions of their own
        os.kill(process, signal.SIGKILL)
    killed.communicate()
    assert not (tmp_path / "runs/killed/checkpoints/step-00000040").exists(), "it was too fast to be killed"

    again = run(tmp_path, variables=variables, **options | {"run.name": "killed"})
    assert again.returncode == 0, again.stderr
    assert "resumed at step 25\n" in again.stdout
    assert losses(tmp_path / "runs/killed") == losses(tmp_path / "runs/whole")


def test_two_machines_are_two_launchers(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    alone = run(tmp_path, **SMALL | {"run.name": "alone"})
    assert alone.returncode == 0, alone.stderr
    shared = {"NPROC": "1", "NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    machines = [start(tmp_path, shared | {"NODE_RANK": rank}, **SMALL | {"run.name": "both"}) for rank in "01"]
    for machine in machines:
        _, errors = machine.communicate(timeout=120)
        assert machine.returncode == 0, errors
    assert losses(tmp_path / "runs/both") == pytest.approx(losses(tmp_path / "runs/alone"), rel=1e-5)


def test_slurm_tasks_are_ranks(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    slurm = {
        "SLURM_STEP_ID": "0", "SLURM_NNODES": "1", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "localhost",
        "MASTER_PORT": port,
    }  # fmt: skip
    tasks = [
        start(tmp_path, slurm | {"SLURM_PROCID": r, "SLURM_LOCALID": r}, **SMALL | {"run.name": "s"}) for r in "01"
    ]
    for task in tasks:
        _, errors = task.communicate(timeout=120)
        assert task.returncode == 0, errors
    assert json.loads((tmp_path / "runs/s/environment.json").read_text())["processes"] == 2


def test_a_mistake_that_only_one_process_meets_is_told(tmp_path: Path) -> None:
    program = (ROOT / "recipes/pretrain.py").read_text()
    line = "    # Data: text to tokens"
    assert program.count(line) == 1
    mistake = "    if mesh.data_rank == 1:\n        raise UserError('only I can see it')\n"
    program = program.replace(line, mistake + line).replace(
        "import torch\n", "import torch\nfrom titanlike.config import UserError\n"
    )
    (tmp_path / "alone.py").write_text(program)
    (tmp_path / "alone.toml").write_text(f'recipe = "alone"\nextends = "{ROOT}/train_configs/debug.toml"\n')
    done = run(tmp_path, "alone.toml", variables={"NPROC": "2"}, **SMALL)
    assert done.returncode in (1, 2)  # 1 if the other process is seen first to have lost its partner
    assert "error: only I can see it\n" in done.stderr


def test_a_process_that_dies_is_named(tmp_path: Path) -> None:
    running = start(tmp_path, {"NPROC": "2"}, **SMALL | {"training.steps": "100000", "run.name": "r"})
    wait_for(tmp_path / "runs/r/metrics.jsonl")
    os.kill(descendants(running.pid)[-1], signal.SIGKILL)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 1
    assert re.search(r"error: process [01] was ended by SIGKILL", errors)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent is dead")
def test_processes_save_and_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    """They would go on writing into the folder that the next start of the run takes up."""
    options = SMALL | {"training.steps": "100000", "checkpoint.interval": "5", "run.name": "r"}
    running = start(tmp_path, {"NPROC": "2"}, **options)
    wait_for(tmp_path / "runs/r/checkpoints/step-00000005")
    running.kill()
    said, _ = running.communicate(timeout=60)  # until nobody can write to it any more
    last = list(losses(tmp_path / "runs/r"))[-1]
    assert (tmp_path / f"runs/r/checkpoints/step-{last:08d}").exists()
    assert f"step {last:>6}/100000  saved" in said


@pytest.mark.parametrize("processes", [1, 2])
def test_ctrl_c_says_how_to_go_on(tmp_path: Path, processes: int) -> None:
    options = SMALL | {"training.steps": "100000", "run.name": "r"}
    running = start(tmp_path, {"NPROC": str(processes)}, **options)
    wait_for(tmp_path / "runs/r/metrics.jsonl")
    time.sleep(0.5)
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does: to every process of the job
    said, errors = running.communicate(timeout=60)
    assert running.returncode == 130
    (saved,) = (tmp_path / "runs/r/checkpoints").glob("step-*")
    step = int(saved.name.removeprefix("step-"))
    assert said.endswith(f"stopped by SIGINT; to go on from step {step}: ./run_train.sh runs/r/recipe.toml\n")
    assert max(losses(tmp_path / "runs/r")) == step
    assert errors == "\nstopping at the end of this step; again to leave at once\n"


@pytest.mark.parametrize("processes", [1, 2])
def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path, processes: int) -> None:
    options = SMALL | {"optimizer.lr": "1e30", "checkpoint.interval": "1", "run.name": "r"}
    done = run(tmp_path, variables={"NPROC": str(processes)}, **options)
    assert done.returncode == 2
    assert "The step was not saved" in done.stderr
    assert "Traceback" not in done.stderr
    stopped = int(done.stderr.split("error: step ")[1].split(":")[0])
    saved = sorted(path.name for path in (tmp_path / "runs/r/checkpoints").glob("step-*"))
    assert saved[-1] == f"step-{stopped - 1:08d}"
    assert max(losses(tmp_path / "runs/r")) == stopped - 1


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_that_would_train_otherwise_is_refused_and_left_alone(tmp_path: Path, processes: int) -> None:
    options = SMALL | {"run.name": "r"}
    variables = {"NPROC": str(processes)}
    assert run(tmp_path, variables=variables, **options).returncode == 0
    before = {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    done = run(tmp_path, variables=variables, **options | {"optimizer.lr": "0.5"})
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert (
        "optimizer.lr was 0.0015, now 0.5. Put these back to resume, or give --run.name to start a new run"
        in done.stderr
    )
    assert {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()} == before


def test_a_terminal_gets_one_live_line(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    options = SMALL | {"validation.interval": "3", "validation.batches": "1", "run.name": "r"}
    running = subprocess.Popen(
        command(**options), cwd=tmp_path, env=environment(TERM="xterm", COLUMNS="200"), stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            seen += os.read(ours, 4096)
        except OSError:  # the other side is closed
            break
    os.close(ours)
    assert running.wait() == 0
    said = seen.decode()
    # Drawn over itself: back to the start of the line between two steps, and no new line.
    first, _, after = said.partition("step      5/6  loss ")
    between = after.partition("step      6/6  loss ")[0]
    assert "step      4/6  loss " in first
    assert "\r" in between
    assert "\n" not in between.split("GiB")[1]
    assert "  val " in between
    assert "tok/s" in between
    assert "\x1b[?25h" in said  # the cursor is shown again


def test_a_deterministic_run_is_repeated_to_the_bit(tmp_path: Path) -> None:
    for name in ("one", "two"):
        done = run(tmp_path, **SMALL | {"run.deterministic": "true", "run.name": name})
        assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "runs/one") == losses(tmp_path / "runs/two")
