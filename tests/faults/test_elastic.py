"""Jobs whose number of nodes changes. Each node is a launcher on the loopback interface."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.launching import ROOT, SMALL, free_port, losses, records, run, start
from titanlike.config import UserError
from titanlike.config.sections import Run
from titanlike.distributed.environment import RankInfo
from titanlike.run.start import Arguments, select_run_dir

OPTIONS = SMALL | {
    "program": "./slow.py", "run.name": "run", "training.steps": "240", "checkpoint.interval": "10", "run.device": "cpu",
}  # fmt: skip
# Every step takes longer, so that the job outlasts the changes. The test reads which node has which rank.
PROGRAM = f"""
import os, time
from pathlib import Path
from titanlike import optim

Path(f"rank-of-{{os.getppid()}}").write_text(os.environ.get("RANK", ""))
original = optim.learning_rate
optim.learning_rate = lambda *arguments: time.sleep(0.1) or original(*arguments)
exec(open("{ROOT}/recipes/pretrain.py").read())
"""
QUICK = "last_call_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=3"


class Nodes:
    """The launchers of a job."""

    def __init__(self, folder: Path, nodes: str) -> None:
        self.folder = folder
        self.shared = {
            "NPROC": "1", "NNODES": nodes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "OMP_NUM_THREADS": "1",
            "PET_RDZV_CONF": QUICK,
        }  # fmt: skip
        self.resumed = 0
        self.started: list[subprocess.Popen[str]] = []

    def start(self, **options: str) -> "subprocess.Popen[str]":
        self.started.append(start(self.folder, self.shared, **OPTIONS | options))
        return self.started[-1]

    def rank(self, node: "subprocess.Popen[str]") -> int:
        """Returns the rank of a node's process."""
        return int((self.folder / f"rank-of-{node.pid}").read_text())

    def kill(self) -> None:
        for node in self.started:
            node.kill()
            node.communicate(timeout=60)

    def wait_for_step(self, step: int) -> None:
        """Waits until the run has recorded a step."""
        self._wait(lambda: self.newest() >= step, f"step {step}")

    def wait_for_resume(self) -> None:
        """Waits until the run has resumed once more, and trained 20 steps."""
        before = self.resumed
        self._wait(lambda: self.resumed_step() > before, "the resume")
        self.resumed = self.resumed_step()
        self.wait_for_step(self.resumed + 20)

    def resumed_step(self) -> int:
        return int(json.loads((self.folder / "runs/run/environment.json").read_text())["resumed_step"])

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < end, f"no {what}"
            time.sleep(0.1)

    def newest(self) -> int:
        metrics = self.folder / "runs/run/metrics.jsonl"
        return max((record["step"] for record in records(metrics.parent)), default=0) if metrics.exists() else 0


def end(node: "subprocess.Popen[str]", code: int = 0) -> str:
    """Waits for a launcher. Returns its output."""
    output, errors = node.communicate(timeout=200)
    assert node.returncode == code, output + errors
    return output + errors


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path, "1:3")
    yield nodes
    nodes.kill()


@pytest.mark.every
@pytest.mark.minutes
def test_a_spare_node_replaces_a_lost_one_and_a_job_goes_on_with_fewer(nodes: Nodes, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "undisturbed"):
        folder.mkdir(exist_ok=True)
        (folder / "slow.py").write_text(PROGRAM)
    two = {"NPROC": "2", "OMP_NUM_THREADS": "1"}
    undisturbed = run(tmp_path / "undisturbed", variables=two, **OPTIONS)
    assert undisturbed.returncode == 0, undisturbed.stderr
    expected = losses(tmp_path / "undisturbed/runs/run")

    first, second = nodes.start(), nodes.start()
    nodes.wait_for_step(15)
    third = nodes.start()  # a batch of four sequences is for one, two or four ranks
    nodes.wait_for_resume()
    lost = next(node for node in (second, third) if nodes.rank(node) < 2)  # the nodes meet at the first one
    left = third if lost is second else second
    os.kill(lost.pid, signal.SIGKILL)
    outputs = [end(lost, -signal.SIGKILL)]
    nodes.wait_for_resume()
    with_two = losses(tmp_path / "runs/run")
    assert with_two == {step: expected[step] for step in with_two}  # bit for bit: the layout has not changed
    left.send_signal(signal.SIGTERM)
    outputs += [end(left, 143), end(first)]
    output = "".join(outputs)
    assert output.count("resumed at step") >= 3  # on a busy machine a node may join late, at a restart of its own
    assert "warning: a node leaves or joins; restarting" in output
    assert "not bit-exact" in output  # the last start has another layout
    assert "Traceback" not in output
    assert losses(tmp_path / "runs/run") == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
def test_a_spare_node_ends_with_the_job(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(PROGRAM)
    nodes = Nodes(tmp_path, "2:3")
    nodes.shared.pop("PET_RDZV_CONF")
    outputs = [end(node) for node in [nodes.start(**{"training.steps": "60"}) for _ in range(3)]]
    assert sum("spare   the recipe can use 2 of the 3 nodes; this one waits" in output for output in outputs) == 1
    assert sum("done: runs/run" in output for output in outputs) == 1
    assert len(losses(tmp_path / "runs/run")) == 60


def test_a_job_that_may_restart_needs_a_name() -> None:
    arguments, nodes = Arguments(["recipe.toml"]), RankInfo(started_by_launcher=True, launch_id="a")
    assert select_run_dir(Run(), arguments, nodes).name == "recipe-a"
    with pytest.raises(UserError, match=r"number of nodes may change needs a name, .*; give --run\.name$"):
        select_run_dir(Run(), arguments, replace(nodes, is_elastic=True))
    with pytest.raises(
        UserError, match=r"^torchrun may restart this job \(--max-restarts=1\).*give --run\.name so that"
    ):
        select_run_dir(Run(), arguments, RankInfo(started_by_launcher=True, max_restarts=1))
