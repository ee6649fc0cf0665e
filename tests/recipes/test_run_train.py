"""`./run_train.sh` with real processes and launchers: output, exit codes and files."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.forkserver import Forked
from tests.launching import ROOT, SMALL, command, environment, free_port, losses, recorded, run, start, wait_for


class Debug(NamedTuple):
    """A shortened run of the debug recipe in one process."""

    run_dir: Path
    output: str


@pytest.fixture(scope="module")
def debug(tmp_path_factory: pytest.TempPathFactory) -> Debug:
    """With a shell and a new interpreter, from a link to the script, beside modules with the names of others."""
    folder = tmp_path_factory.mktemp("debug")
    for name in ("tomli.py", "glob.py", "titanlike.py", "main.py"):
        (folder / name).write_text("raise SystemExit('the wrong module')")
    (folder / "link").symlink_to(ROOT / "run_train.sh")
    keys = {
        "training.global_batch_size": "4", "training.local_batch_size": "2", "training.steps": "12",
        "schedule.warmup_steps": "4", "metrics.interval": "1", "validation.interval": "6", "sample.tokens": "8",
    }  # fmt: skip
    options = [f"--{key}={value}" for key, value in keys.items()]
    done = subprocess.run(
        [str(folder / "link"), *options], cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (run_dir,) = (folder / "runs").iterdir()
    return Debug(run_dir, done.stdout)


def test_debug_recipe_learns_and_writes_all_files(debug: Debug) -> None:
    folder, output = debug
    found = losses(folder)
    assert list(found) == list(range(1, 13))
    assert found[12] < found[1] - 1.0  # from ln(320) = 5.8
    validation = recorded(folder, "validation_loss")
    assert len(validation) == 2
    assert max(validation) < found[1]
    assert min(recorded(folder, "tokens_per_second")) > 0
    assert {path.name for path in folder.iterdir()} == {
        "recipe.toml", "environment.json", "metrics.jsonl", "tensorboard", "checkpoints", "lock",
    }  # fmt: skip
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"latest", "step-00000012"}
    metadata = json.loads((folder / "environment.json").read_text())
    assert {"torch", "python", "device", "git_commit", "host", "command"} <= metadata.keys()
    assert "sample after 12 steps:\ndef " in output
    done, best, *others = output.splitlines()[-6:]
    assert done == f"done: runs/{folder.name}"
    step = 6 * (1 + validation.index(min(validation)))
    assert best == f"best    validation loss {min(validation):.4f} at step {step}"
    assert others == [
        f"weights runs/{folder.name}/checkpoints",
        f"next    titanlike generate runs/{folder.name} --prompt TEXT",
        f"        titanlike export runs/{folder.name} FOLDER",
        f"        titanlike compare runs/{folder.name} OTHER_RUN",
    ]


def test_first_line_is_printed_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit(7)")
    arguments = [sys.executable, "-c", f"import sys, runpy; sys.path.insert(0, {str(tmp_path)!r}); sys.argv = sys.argv[1:]; "
             "runpy.run_path(sys.argv[0], run_name='__main__')", str(ROOT / "recipes/pretrain.py")]  # fmt: skip
    done = subprocess.run(
        arguments, cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True, check=False
    )
    assert done.returncode == 7
    assert re.fullmatch(
        r"run     runs/debug-\d{8}-\d{6}-\w{4}\nprogram .*/recipes/pretrain\.py, recipe .*/train_configs/debug\.toml\n"
        r"start   importing torch\n",
        done.stdout,
    )


def test_resolved_recipe_finds_its_finished_run(debug: Debug, tmp_path: Path) -> None:
    """From another working directory, after the run directory was moved and renamed."""
    moved = tmp_path / "elsewhere" / "renamed"
    shutil.copytree(debug.run_dir, moved)
    (tmp_path / "cwd").mkdir()
    before = losses(moved)
    done = run(tmp_path / "cwd", "../elsewhere/renamed/recipe.toml")
    assert done.returncode == 0, done.stderr
    assert "resumed at step 12\n" in done.stdout
    assert losses(moved) == before
    assert not list((tmp_path / "cwd").iterdir())


@pytest.mark.parametrize("seconds", [0.5, 2.0])  # in the launcher, and while torch is imported
def test_ctrl_c_during_startup_prints_no_traceback(tmp_path: Path, seconds: float) -> None:
    running = start(tmp_path, real=True, **SMALL | {"training.steps": "100000"})
    time.sleep(seconds)
    os.killpg(running.pid, signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode in (130, -signal.SIGINT)
    assert "Traceback" not in errors


def test_two_nodes_with_one_launcher_each(tmp_path: Path) -> None:
    shared = {"NPROC": "1", "NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    nodes = [start(tmp_path, shared | {"NODE_RANK": rank}, **SMALL) for rank in "01"]
    outputs = []
    for node in nodes:
        output, errors = node.communicate(timeout=120)
        assert node.returncode == 0, errors
        outputs.append(output)
    assert "ranks   2 on cpu;" in outputs[0]
    assert "          shard        2  shards of weights, gradients and optimizer state\n" in outputs[0]
    assert "".join(outputs).count("step      5/6  loss") == 1  # only rank 0 prints


def test_user_error_on_one_rank_is_printed(tmp_path: Path) -> None:
    program = (ROOT / "recipes/pretrain.py").read_text()
    line = "        # Data: text to tokens"
    assert program.count(line) == 1
    inserted = "        if mesh.data_rank == 1:\n            raise UserError('only on rank 1')\n"
    program = program.replace(line, inserted + line).replace(
        "import torch\n", "import torch\nfrom titanlike.config import UserError\n"
    )
    (tmp_path / "own.py").write_text(program)
    (tmp_path / "own.toml").write_text(f'program = "own"\nextends = "{ROOT}/train_configs/debug.toml"\n')
    done = run(tmp_path, "own.toml", variables={"NPROC": "2"}, **SMALL)
    assert done.returncode in (1, 2)  # 1 if the launcher sees first that the other process lost its connection
    assert "error: only on rank 1\n" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="requires Linux: PR_SET_PDEATHSIG")
def test_processes_save_and_exit_when_their_launcher_is_killed(tmp_path: Path) -> None:
    """Otherwise they would continue to write to the run directory that the next launch resumes from."""
    options = SMALL | {"training.steps": "100000", "checkpoint.interval": "5", "run.name": "r"}
    running = start(tmp_path, {"NPROC": "2"}, **options)
    wait_for(tmp_path / "runs/r/checkpoints/step-00000005")
    running.kill()
    output, _ = running.communicate(timeout=60)  # until all processes have closed the pipe
    last = list(losses(tmp_path / "runs/r"))[-1]
    assert (tmp_path / f"runs/r/checkpoints/step-{last:08d}").exists()
    assert f"step {last:>6}/100000  saved" in output


def test_ctrl_c_prints_the_command_to_resume(tmp_path: Path) -> None:
    running = start(tmp_path, {"NPROC": "2"}, **SMALL | {"training.steps": "100000", "run.name": "r"})
    wait_for(tmp_path / "runs/r/metrics.jsonl")
    time.sleep(0.5)
    os.killpg(running.pid, signal.SIGINT)  # to every process of the job, as a terminal does
    output, errors = running.communicate(timeout=60)
    assert running.returncode == 130
    (saved,) = (tmp_path / "runs/r/checkpoints").glob("step-*")
    step = int(saved.name.removeprefix("step-"))
    assert output.endswith(f"stopped by SIGINT; to resume from step {step}: titanlike train runs/r/recipe.toml\n")
    assert max(losses(tmp_path / "runs/r")) == step
    assert errors == "\nstopping after this step or the next; press Ctrl-C again to exit at once\n"


def test_a_pipe_that_nobody_reads_any_more_stops_a_run_that_saves(tmp_path: Path) -> None:
    """As in `./run_train.sh | head`."""
    running = start(tmp_path, {"NPROC": "2"}, **SMALL | {"training.steps": "100000", "run.name": "r"})
    assert running.stdout and running.stderr
    while not running.stdout.readline().startswith("step"):
        pass
    running.stdout.close()
    with running.stderr as errors:
        assert errors.read() == ""
    assert running.wait() == 128 + signal.SIGPIPE
    (saved,) = (tmp_path / "runs/r/checkpoints").glob("step-*")
    assert saved.name == f"step-{max(losses(tmp_path / 'runs/r')):08d}"


@pytest.mark.skipif(sys.platform != "linux", reason="requires Linux: a controlling terminal")
@pytest.mark.parametrize(("nohup", "processes"), [(False, 2), (True, 1)], ids=["hangup", "nohup"])
def test_a_run_whose_terminal_is_closed_saves(tmp_path: Path, nohup: bool, processes: int) -> None:
    controller, terminal = os.openpty()
    (tmp_path / "attached.py").write_text(
        "import fcntl, runpy, signal, sys, termios\n"
        f"signal.signal(signal.SIGHUP, signal.{'SIG_IGN' if nohup else 'SIG_DFL'})\n"
        "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    steps = 60 if nohup else 100_000
    options = SMALL | {"training.steps": str(steps), "run.name": "r"}
    python, *program = command(**options)
    running = Forked(
        [python, "attached.py", *program], cwd=tmp_path, env=environment(TERM="xterm", NPROC=str(processes)),
        stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
    )  # fmt: skip
    os.close(terminal)
    received = b""
    while b"tok/s" not in received:
        received += os.read(controller, 4096)
    os.close(controller)
    assert running.wait(timeout=120) == (0 if nohup else 128 + signal.SIGHUP)
    (saved,) = (tmp_path / "runs/r/checkpoints").glob("step-*")
    last = max(losses(tmp_path / "runs/r"))
    assert saved.name == f"step-{last:08d}" and (last == steps) == nohup


def test_terminal_shows_a_status_that_is_updated_in_place(tmp_path: Path) -> None:
    controller, terminal = os.openpty()
    running = Forked(
        command(**SMALL), cwd=tmp_path, env=environment(TERM="xterm", COLUMNS="200"), stdin=subprocess.DEVNULL,
        stdout=terminal, stderr=terminal,
    )  # fmt: skip
    os.close(terminal)
    received = b""
    with suppress(OSError):  # the process has closed the terminal
        while True:
            received += os.read(controller, 4096)
    os.close(controller)
    assert running.wait() == 0
    output = received.decode()
    # The three lines of the status are redrawn in place: the cursor goes up twice, and each line is erased.
    first, _, after = output.partition("step      5/6")
    assert "step      4/6" in first
    assert "\r\x1b[2K\x1b[1A\x1b[2K\x1b[1A\x1b[2K" in after.partition("step      6/6")[0]
    assert "\x1b[?25h" in output  # shows the cursor again
