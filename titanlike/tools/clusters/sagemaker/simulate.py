"""Runs a job locally: one process per host, each with its own /opt/ml, the real entry point and the real request. No Docker.

FOLDER/s3/BUCKET/KEY replaces s3://BUCKET/KEY. Each host's /opt/ml is a directory prepared as SageMaker prepares it, whose
/opt/ml/checkpoints is synchronized with S3, as by SageMaker's agent.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from titanlike.config import UserError
from titanlike.tools.clusters.sagemaker.bundle import Bundle
from titanlike.tools.clusters.sagemaker.request import CODE, OPT
from titanlike.utils.system import share_cores

KILL_DELAY = 120.0  # seconds from SIGTERM to SIGKILL, as on SageMaker
SYNC_INTERVAL = 0.5  # seconds
NOTICE_DELAY = 2.0  # seconds until the service notices a failed host


@dataclass(frozen=True)
class Result:
    """The end of a host's process."""

    host: str
    code: int
    failure: str  # content of the failure file

    def __str__(self) -> str:
        state = {0: "completed", 143: "stopped", 130: "stopped"}.get(self.code, f"failed, exit code {self.code}")
        return f"{self.host}: {state}" + (f": {self.failure.splitlines()[0]}" if self.failure else "")


class Host:
    """One instance of the job, on loopback."""

    def __init__(self, index: int, request: dict[str, Any], folder: Path, variables: dict[str, str]) -> None:
        self.label = f"algo-{index + 1}"
        self.root = folder / "jobs" / request["TrainingJobName"] / self.label
        self._write_config(index, request)
        local = _localize(request, self.root, folder)
        for channel in local["InputDataConfig"]:
            self._prepare_channel(channel, folder)
        checkpoints, algorithm = local["CheckpointConfig"], local["AlgorithmSpecification"]
        self.checkpoints = SyncedFolder(Path(checkpoints["LocalPath"]), _path(checkpoints["S3Uri"]))
        own = {"SAGEMAKER_BASE_DIR": str(self.root), "PYTHONDONTWRITEBYTECODE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, *algorithm["ContainerEntrypoint"][1:], *algorithm["ContainerArguments"]],
            env={**os.environ, **own, **local["Environment"], **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # the simulation handles Ctrl-C, and stops the hosts
        )
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def stop(self) -> None:
        """Sends SIGTERM to the host's first process."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()

    def kill(self) -> None:
        """Kills all processes of the host."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def result(self) -> Result:
        """Waits for the process, its output and its files."""
        code = self.process.wait()
        code = code if code >= 0 else 128 - code  # as a container reports a signal that ended its process
        self.kill()  # orphans of the first process
        self.reader.join(timeout=10)
        self.checkpoints.sync()
        failure = self.root / "output/failure"
        return Result(self.label, code, failure.read_text() if failure.exists() else "")

    def _write_config(self, index: int, request: dict[str, Any]) -> None:
        folder = self.root / "input/config"
        folder.mkdir(parents=True)
        hosts = [f"127.0.0.{number + 1}" for number in range(request["ResourceConfig"]["InstanceCount"])]
        resources = {
            "current_host": hosts[index],
            "hosts": hosts,
            "network_interface_name": "lo",
            "current_instance_type": request["ResourceConfig"]["InstanceType"],
        }
        (folder / "resourceconfig.json").write_text(json.dumps(resources))
        (folder / "hyperparameters.json").write_text("{}")
        channels = {channel["ChannelName"]: channel for channel in request["InputDataConfig"]}
        (folder / "inputdataconfig.json").write_text(json.dumps(channels))

    def _prepare_channel(self, channel: dict[str, Any], folder: Path) -> None:
        target = self.root / "input/data" / channel["ChannelName"]
        target.parent.mkdir(parents=True, exist_ok=True)
        if fsx := channel["DataSource"].get("FileSystemDataSource"):
            source = folder / "fsx" / fsx["FileSystemId"] / fsx["DirectoryPath"].lstrip("/")
            source.mkdir(parents=True, exist_ok=True)
            target.symlink_to(source)
            return
        source = _path(channel["DataSource"]["S3DataSource"]["S3Uri"])
        if source.is_file():
            target.mkdir()
            shutil.copy(source, target)
        elif source.is_dir():
            shutil.copytree(source, target)
        else:
            raise UserError(
                f"{source} does not exist: in a simulation, it replaces the channel's data in S3; copy them there"
            )

    def _read(self) -> None:
        assert self.process.stdout
        with self.process.stdout as stream:
            for line in stream:
                self.lines.append(line.rstrip("\n"))
                print(f"[{self.label}] {line}", end="", flush=True)


class SyncedFolder:
    """A directory that is restored from S3, and whose changes are copied to S3."""

    def __init__(self, local: Path, remote: Path) -> None:
        self.local, self.remote = local, remote
        local.mkdir(parents=True, exist_ok=True)
        if remote.exists():
            shutil.copytree(remote, local, dirs_exist_ok=True)
        self.synced = self._scan()

    def _scan(self) -> dict[Path, tuple[int, int]]:
        files = {}
        for path in self.local.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                if path.is_file():
                    files[path.relative_to(self.local)] = (status.st_mtime_ns, status.st_size)
        return files

    def sync(self) -> None:
        """Copies changed files to S3, and deletes removed ones there."""
        files = self._scan()
        for name in (name for name, status in files.items() if self.synced.get(name) != status):
            (self.remote / name).parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                shutil.copy2(self.local / name, self.remote / name)
        for name in self.synced.keys() - files.keys():
            (self.remote / name).unlink(missing_ok=True)
        self.synced = files


class Simulation:
    """A job whose hosts are local processes."""

    def __init__(self, request: dict[str, Any], bundle: Bundle, folder: Path, processes: int = 1) -> None:
        """Writes the job's files and starts the hosts, each with `processes` ranks."""
        folder = folder.absolute()
        code = next(channel for channel in request["InputDataConfig"] if channel["ChannelName"] == CODE)
        bundle.write(_path(_localize(code, folder, folder)["DataSource"]["S3DataSource"]["S3Uri"]))
        self.deadline = time.monotonic() + request["StoppingCondition"]["MaxRuntimeInSeconds"]
        num_hosts = request["ResourceConfig"]["InstanceCount"]
        variables = {
            "NPROC": str(processes),
            "MASTER_PORT": str(_free_port()),
            "CUDA_VISIBLE_DEVICES": "",
            **share_cores(num_hosts * processes),
        }
        self.hosts = [Host(index, request, folder, variables) for index in range(num_hosts)]

    def stop(self) -> None:
        """Stops the job, as SageMaker does."""
        for host in self.hosts:
            host.stop()

    def kill(self) -> None:
        """Kills all hosts."""
        for host in self.hosts:
            host.kill()

    def wait(self) -> list[Result]:
        """Waits for all hosts. When one fails, the others are stopped, as on SageMaker."""
        stopped_at: float | None = None
        synced_at = time.monotonic()
        while any(host.process.poll() is None for host in self.hosts):
            has_failed = any(host.process.poll() not in (None, 0) for host in self.hosts)
            if stopped_at is None and (has_failed or time.monotonic() > self.deadline):
                stopped_at = time.monotonic()
                time.sleep(NOTICE_DELAY)
                self.stop()
            if stopped_at is not None and time.monotonic() - stopped_at > KILL_DELAY:
                self.kill()
            if time.monotonic() - synced_at > SYNC_INTERVAL:
                for host in self.hosts:
                    host.checkpoints.sync()
                synced_at = time.monotonic()
            time.sleep(0.05)
        return [host.result() for host in self.hosts]


def _localize(request: dict[str, Any], root: Path, folder: Path) -> dict[str, Any]:
    """Replaces the container's and S3's paths in a request by local ones."""
    text = json.dumps(request)
    for remote, local in ((OPT, str(root)), ("s3://", f"file://{folder}/s3/")):
        text = text.replace(remote, json.dumps(local)[1:-1])
    return json.loads(text)


def _path(uri: str) -> Path:
    return Path(urlsplit(uri).path)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
