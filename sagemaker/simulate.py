"""The job, run here: as many hosts as asked for, each with its own /opt/ml, the real entry and the real request. No Docker.

A folder stands in for S3: what the request calls s3://BUCKET/KEY is FOLDER/s3/BUCKET/KEY. Each host is a process whose /opt/ml is
a folder, filled as SageMaker fills it; an agent beside it carries /opt/ml/checkpoints to and fro, as SageMaker's does.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from parcel import Parcel
from request import OPT

from titanlike.utils.system import share_cores

GRACE = 120.0  # seconds from SIGTERM to SIGKILL, as `docker stop` waits there


@dataclass(frozen=True)
class Ended:
    """How a host ended."""

    host: str
    code: int
    failure: str  # what its failure file says


class Host:
    """One machine of the job, on loopback."""

    def __init__(self, number: int, request: dict[str, Any], folder: Path, variables: dict[str, str]) -> None:
        self.folder = folder  # of the simulation
        self.label = f"algo-{number + 1}"
        self.root = folder / "jobs" / request["TrainingJobName"] / self.label
        count = request["ResourceConfig"]["InstanceCount"]
        self._lay_config([f"127.0.0.{n + 1}" for n in range(count)], number, request)
        for channel in request["InputDataConfig"]:
            self._lay_channel(channel)
        kept = request["CheckpointConfig"]
        self.agent = Agent(self.here(kept["LocalPath"]), self.bucket(kept["S3Uri"]))
        algorithm = request["AlgorithmSpecification"]
        command: list[str] = [*algorithm["ContainerEntrypoint"][1:], *algorithm["ContainerArguments"]]
        given = {name: self.text(value) for name, value in request["Environment"].items()}
        mine = {"SAGEMAKER_BASE_DIR": str(self.root), "PYTHONDONTWRITEBYTECODE": "1", **given, **variables}
        self.process = subprocess.Popen(
            [sys.executable, *map(self.text, command)],
            env={**os.environ, **mine},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # a Ctrl-C is for the simulation, which tells the hosts
        )
        self.said: list[str] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Tell the host's first process to stop."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def end(self) -> None:
        """End all of its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def ended(self) -> Ended:
        """Wait for its last words, and carry its last files away."""
        code = self.process.wait()
        self.end()  # whom a killed parent has left
        self.reader.join(timeout=10)
        self.agent.close()
        failure = self.root / "output/failure"
        return Ended(self.label, code, failure.read_text() if failure.exists() else "")

    def here(self, path: str) -> Path:
        """What the container calls /opt/ml/..."""
        return Path(path.replace(OPT, str(self.root)))

    def bucket(self, address: str) -> Path:
        """The folder that stands in for an address."""
        where = urlsplit(address)
        return self.folder / where.scheme / where.netloc / where.path.lstrip("/")

    def text(self, word: str) -> str:
        """A word of the request as it is here."""
        return word.replace(OPT, str(self.root)).replace("s3://", f"file://{self.folder}/s3/")

    def _lay_config(self, hosts: list[str], number: int, request: dict[str, Any]) -> None:
        config = self.root / "input/config"
        config.mkdir(parents=True)
        resources = {
            "current_host": hosts[number],
            "hosts": hosts,
            "network_interface_name": "lo",
            "current_instance_type": request["ResourceConfig"]["InstanceType"],
        }
        (config / "resourceconfig.json").write_text(json.dumps(resources))
        (config / "hyperparameters.json").write_text("{}")
        channels = {channel["ChannelName"]: channel for channel in request["InputDataConfig"]}
        (config / "inputdataconfig.json").write_text(json.dumps(channels))

    def _lay_channel(self, channel: dict[str, Any]) -> None:
        place = self.root / "input/data" / channel["ChannelName"]
        place.parent.mkdir(parents=True, exist_ok=True)
        source = channel["DataSource"]
        if "S3DataSource" in source:
            there = self.bucket(source["S3DataSource"]["S3Uri"])
            if there.is_file():
                place.mkdir()
                shutil.copy(there, place)
            else:
                shutil.copytree(there, place)
        else:
            mounted = source["FileSystemDataSource"]
            there = self.folder / "fsx" / mounted["FileSystemId"] / mounted["DirectoryPath"].lstrip("/")
            there.mkdir(parents=True, exist_ok=True)
            place.symlink_to(there)

    def _read(self) -> None:
        assert self.process.stdout
        with self.process.stdout as stream:
            for line in stream:
                self.said.append(line.rstrip("\n"))
                print(f"[{self.label}] {line}", end="", flush=True)


class Agent(threading.Thread):
    """Carries a folder to S3 as it changes: files that are new or other, and that files are gone. First of all it brings back
    what is there."""

    def __init__(self, here: Path, there: Path, interval: float = 0.5) -> None:
        super().__init__(daemon=True)
        self.place, self.there, self.interval = here, there, interval
        here.mkdir(parents=True, exist_ok=True)
        if there.exists():
            shutil.copytree(there, here, dirs_exist_ok=True)
        self.known = self._look()
        self.over = threading.Event()
        self.start()

    def run(self) -> None:
        """Look and carry until it is over."""
        while not self.over.wait(self.interval):
            self._carry()

    def close(self) -> None:
        """Carry what is left."""
        self.over.set()
        self.join()
        self._carry()

    def _look(self) -> dict[Path, tuple[int, int]]:
        found = {}
        for path in self.place.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                if path.is_file():
                    found[path.relative_to(self.place)] = (status.st_mtime_ns, status.st_size)
        return found

    def _carry(self) -> None:
        now = self._look()
        for name in [name for name, status in now.items() if self.known.get(name) != status]:
            (self.there / name).parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                shutil.copy2(self.place / name, self.there / name)
        for name in self.known.keys() - now.keys():
            (self.there / name).unlink(missing_ok=True)
        self.known = now


class Simulation:
    """A job that runs here."""

    def __init__(self, request: dict[str, Any], parcel: Parcel, folder: Path, processes: int = 1) -> None:
        """Lay everything and start the hosts, with so many processes on each."""
        self.folder = folder.absolute()
        code = next(c for c in request["InputDataConfig"] if c["ChannelName"] == "code")
        where = urlsplit(code["DataSource"]["S3DataSource"]["S3Uri"])
        parcel.lay_into(self.folder / "s3" / where.netloc / where.path.lstrip("/"))
        self.limit = time.monotonic() + request["StoppingCondition"]["MaxRuntimeInSeconds"]
        count = request["ResourceConfig"]["InstanceCount"]
        variables = {
            "NPROC": str(processes),
            "MASTER_PORT": str(_free_port()),
            "CUDA_VISIBLE_DEVICES": "",
            "SMOKE_GPUS": "0",
            "SMOKE_EFA": "",
            **share_cores(count * processes),  # each host would take all
        }
        self.hosts: list[Host] = []
        for number in range(count):
            self.hosts.append(Host(number, request, self.folder, variables))

    def stop(self) -> None:
        """Stop the job, as SageMaker does."""
        for host in self.hosts:
            host.stop()

    def wait(self) -> list[Ended]:
        """Wait for all hosts. When one fails, the others are stopped, as SageMaker stops them."""
        told: float | None = None
        while any(host.process.poll() is None for host in self.hosts):
            failed = any(host.process.poll() not in (None, 0) for host in self.hosts)
            if told is None and (failed or time.monotonic() > self.limit):
                told = time.monotonic()
                time.sleep(2.0)  # until the service has noticed
                self.stop()
            if told is not None and time.monotonic() - told > GRACE:
                self.end()
            time.sleep(0.05)
        return [host.ended() for host in self.hosts]

    def end(self) -> None:
        """Kill all of it."""
        for host in self.hosts:
            host.end()


def summary(ended: Iterable[Ended]) -> list[str]:
    """How the job ended, in the words that SageMaker has for it."""
    lines = []
    for one in ended:
        state = (
            "stopped" if one.code in (143, 130) else "completed" if one.code == 0 else f"failed, exit code {one.code}"
        )
        lines.append(f"{one.host}: {state}" + (f": {one.failure.splitlines()[0]}" if one.failure else ""))
    return lines


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
