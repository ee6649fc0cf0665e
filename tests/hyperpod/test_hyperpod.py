"""`titanlike launch kubernetes --kind hyperpod` beside AWS's own packages. Requires them:

pip install --no-deps sagemaker-hyperpod hyperpod-elastic-agent && pip install fastapi uvicorn psutil
pytest -n 0 -m slow tests/hyperpod
"""

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.launching import ROOT, SMALL, Cli, environment, free_port, losses, records
from titanlike.tools.planning.hardware import hardware_names, load_hardware

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("hyperpod_elastic_agent") is None,
        reason="requires sagemaker-hyperpod and hyperpod-elastic-agent",
    ),
]


def published(name: str) -> ModuleType:
    """Returns a module of sagemaker-hyperpod without the package, which imports a client of Kubernetes."""
    file = importlib.metadata.distribution("sagemaker-hyperpod").locate_file(f"sagemaker/hyperpod/training/{name}.py")
    spec = importlib.util.spec_from_file_location(Path(name).name, str(file))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # in which pydantic looks up the names of types
    spec.loader.exec_module(module)
    return module


def launch(cli: Cli, out: Path, recipe: str, *options: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the ConfigMap and the job."""
    words = [
        "launch",
        "kubernetes",
        str(ROOT / "train_configs" / recipe),
        "--kind=hyperpod",
        "--image=i",
        "--claim=fsx",
    ]
    cli(*words, f"--out={out}", "--dry-run", *options)
    config, job = yaml.safe_load_all((out / "hyperpod.yaml").read_text())
    return config, job


@pytest.mark.parametrize("options", [["--nodes=2", "--secret=keys", "--hardware=ml.p5.48xlarge"], []])
def test_the_job_is_valid_in_the_published_schema(options: list[str], tmp_path: Path, cli: Cli) -> None:
    _, job = launch(cli, tmp_path / "out", "llama3_8b.toml", *options)
    schema = published("config/hyperpod_pytorch_job_unified_config")._HyperPodPytorchJob
    # It ignores an unknown key of the specification itself, and refuses any other. What it parses is what was written.
    assert schema.model_validate(job["spec"], by_name=True).model_dump(exclude_unset=True) == job["spec"]
    assert job["apiVersion"] == "sagemaker.amazonaws.com/v1" and job["kind"] == "HyperPodPyTorchJob"


def test_instance_types_have_the_published_gpus_and_interfaces() -> None:
    table = published("constants").INSTANCE_RESOURCES
    known = {name: load_hardware(name) for name in hardware_names() if name in table}
    assert len(known) > 10
    assert {name: (each.gpus_per_node, each.efa_interfaces) for name, each in known.items()} == {
        name: (table[name]["gpu"], table[name]["efa"]) for name in known
    }


# The agent defines an option of torchrun that torch has, too, since version 2.12.
PROGRAM = """
import argparse, runpy, sys
argparse._ActionsContainer._handle_conflict_error = argparse._ActionsContainer._handle_conflict_resolve
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Agent:
    """HyperPod's agent of one pod, and its operator, as which this test speaks to it."""

    def __init__(self, folder: Path, rank: int, command: list[str]) -> None:
        self.port, self.rank = free_port(), rank
        agent, *arguments = command
        settings = [f"--server-port={self.port}", f"--rdzv-conf=resource_config_dir={folder}/agent{rank}"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(Path(sys.executable).parent / agent), *settings, *arguments], cwd=folder,
            env=environment(NNODES="2", PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1"), stdout=subprocess.DEVNULL,
        )  # fmt: skip

    def call(self, name: str, body: dict[str, Any] | None = None) -> Any:
        """Calls the agent's interface, and waits until it listens."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/{name}", data, {"Content-Type": "application/json"}
        )
        end = time.monotonic() + 120
        while True:
            try:
                text = urllib.request.urlopen(request, timeout=60).read()
                return json.loads(text) if text else None
            except OSError:
                assert time.monotonic() < end and self.process.poll() is None, "the agent does not listen"
                time.sleep(0.2)

    def start(self, master_port: str) -> None:
        place = {"rank": self.rank, "nnodes": 2, "master_addr": "127.0.0.1", "master_port": master_port}
        self.call("start", {**place, "faultCount": 0})


def test_two_pods_train_stop_at_sigterm_and_resume(tmp_path: Path, cli: Cli) -> None:
    keys = SMALL | {"training.steps": "300", "checkpoint.interval": "0", "run.device": "cpu", "run.name": "a"}
    options = ["--nodes=2", "--gpus-per-node=1", *(f"--{key}={value}" for key, value in keys.items())]
    config, job = launch(cli, tmp_path / "out", "debug.toml", *options)
    for name, text in config["data"].items():
        (tmp_path / name).write_text(text)
    (container,) = job["spec"]["replicaSpecs"][0]["template"]["spec"]["containers"]
    command = [word.replace("/etc/titanlike", str(tmp_path)) for word in container["command"]]
    metrics = tmp_path / "runs/a/metrics.jsonl"
    agents: list[Agent] = []
    try:
        for attempt in range(2):
            port = free_port()
            agents = [Agent(tmp_path, rank, command) for rank in range(2)]
            for agent in agents:
                agent.start(port)
            end = time.monotonic() + 240
            if attempt == 0:
                while not (metrics.exists() and len(metrics.read_text().splitlines()) > 10):
                    assert time.monotonic() < end, agents[0].call("status")
                    time.sleep(0.1)
                for agent in agents:
                    agent.process.terminate()  # as Kubernetes does before it deletes a pod
            else:
                while any(agent.call("status")["status"] != "completed" for agent in agents):
                    assert time.monotonic() < end, [agent.call("status") for agent in agents]
                    time.sleep(0.2)
                for agent in agents:
                    agent.call("shutdown", {})
            assert all(agent.process.wait(120) is not None for agent in agents)
    finally:
        for agent in agents:
            agent.process.kill()
            agent.process.wait()
    saved = [record["step"] for record in records(tmp_path / "runs/a") if "save_seconds" in record]
    assert len(saved) == 2 and 5 <= saved[0] < 300 == saved[1]
    assert sorted(losses(tmp_path / "runs/a")) == list(range(1, 301))
