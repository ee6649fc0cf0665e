"""The entry point on every host of a SageMaker job: starts the launcher, and records the cause of a failure.

Imports only the standard library: it installs the missing requirements before anything else is imported.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(os.environ.get("SAGEMAKER_BASE_DIR", "/opt/ml"))
CODE = Path(__file__).resolve().parents[4]
STOP_CODES = (128 + signal.SIGTERM, 128 + signal.SIGINT)
# Errors of a process whose peer on another host has exited.
LOST_PEER = (
    "Connection closed by peer", "Connection reset by peer", "ncclRemoteError", "remote process exited", "Broken pipe",
)  # fmt: skip
HOST_TIMEOUT = 900.0  # seconds between the starts of two hosts
FAILURE_LENGTH = 1024  # characters of the failure file that SageMaker shows


def main(arguments: list[str]) -> int:
    """Runs this host's part of the job. Returns the exit code."""
    # As the container's first process, it ignores signals without a handler.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    host, variables = topology(json.loads((ROOT / "input/config/resourceconfig.json").read_text()))
    variables["SM_MODEL_DIR"] = str(
        ROOT / "model"
    )  # as SageMaker's toolkits do; the program then writes to its directories
    environment = {**variables, **os.environ, "PYTHONPATH": str(CODE), "PYTHONUNBUFFERED": "1"}
    error = install(CODE / "requirements.txt") or wait_for_host(environment["MASTER_ADDR"])
    if error:
        return fail(host, [f"error: {error}"], 2)
    programs = [[str(CODE / "titanlike/run/launch.py"), *arguments]]
    if arguments[:1] == ["--doctor"]:
        doctor = ["-m", "titanlike", "doctor"]
        programs = [doctor, [*doctor, "--network", f"--hardware={arguments[1]}"]]
    for program in programs:
        code, last_lines = run([sys.executable, *program], environment)
        if code:
            return code if code in STOP_CODES else fail(host, last_lines, code)
    return 0


def topology(config: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """Returns this host's name and the launcher's variables. The first host in sorted order is the rendezvous."""
    hosts, host = sorted(config["hosts"]), config["current_host"]
    interface = config.get("network_interface_name", "eth0")
    return host, {
        "NNODES": str(len(hosts)),
        "NODE_RANK": str(hosts.index(host)),
        "MASTER_ADDR": hosts[0],
        "NCCL_SOCKET_IFNAME": interface,
        "GLOO_SOCKET_IFNAME": interface,
    }


def wait_for_host(name: str, seconds: float = HOST_TIMEOUT) -> str:
    """Waits until a host has a name: its container may start later. Returns an error message, or an empty string."""
    end = time.monotonic() + seconds
    while True:
        try:
            socket.getaddrinfo(name, None)
            return ""
        except OSError as error:
            if time.monotonic() >= end:
                return f"the host {name} did not start within {seconds:.0f} s: {error}"
        time.sleep(min(1.0, seconds))


def install(requirements: Path) -> str:
    """Installs what the image lacks, except torch. Returns an error message, or an empty string."""
    missing = missing_requirements(requirements.read_text().split())
    torch = next((line for line in missing if re.match("torch[<>=]", line)), None)
    if torch:
        return f"the image lacks {torch}; choose another --image"
    if not missing:
        return ""
    print(f"installing {', '.join(missing)}", flush=True)
    constraints = ROOT / "input/constraints.txt"
    constraints.write_text(f"torch=={metadata.version('torch')}\n")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "-r", str(requirements), "-c", str(constraints)]
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False)
    if not done.returncode:
        return ""
    reason = " ".join(done.stderr.split())[-500:]
    return (
        f"the image lacks {', '.join(missing)}, and pip cannot install them; choose an --image that has them: {reason}"
    )


def missing_requirements(requirements: list[str]) -> list[str]:
    """Returns the requirements that are not installed, or not in the required version."""
    from pip._vendor.packaging.requirements import Requirement

    missing = []
    for line in requirements:
        requirement = Requirement(line)
        try:
            version = metadata.version(requirement.name).partition("+")[0]
        except metadata.PackageNotFoundError:
            version = ""
        if not version or not requirement.specifier.contains(version, prereleases=True):
            missing.append(line)
    return missing


def run(command: list[str], environment: dict[str, str]) -> tuple[int, list[str]]:
    """Runs a program, forwarding stop signals. Returns its exit code and the last lines of stderr."""
    last_lines: deque[str] = deque(maxlen=400)
    process = subprocess.Popen(command, env=environment, cwd=CODE, stderr=subprocess.PIPE, text=True, errors="replace")
    # SageMaker stops a container with SIGTERM to its first process, which is this one, and SIGKILL after 120 seconds.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: process.send_signal(received))

    def read() -> None:
        assert process.stderr
        for line in process.stderr:
            sys.stderr.write(line)
            sys.stderr.flush()
            last_lines.append(line.rstrip())

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    code = process.wait()
    reader.join(timeout=5)  # an orphan may keep the pipe open
    return (code if code >= 0 else 128 - code), list(last_lines)


def fail(host: str, last_lines: list[str], code: int) -> int:
    """Writes the failure file, whose beginning SageMaker shows. Returns `code`."""
    errors = [line.removeprefix("error: ") for line in last_lines if line.startswith("error: ")]
    raised = first_exception(last_lines)
    cause = "; ".join(dict.fromkeys([raised, *errors] if raised else errors)) or f"the training exited with code {code}"
    if any(text in cause for text in LOST_PEER):
        cause = f"lost the connection to another host, see its failure file: {cause}"
    text = f"{host}: {cause}"[: FAILURE_LENGTH - 1]
    (ROOT / "output").mkdir(parents=True, exist_ok=True)
    (ROOT / "output/failure").write_text("\n".join([text, "", *last_lines, ""]))
    print(f"error: {text}", file=sys.stderr, flush=True)
    return code


def first_exception(lines: list[str]) -> str:
    """Returns the last line of the first traceback. Later ones may be of ranks that lost the failed one."""
    starts = [index for index, line in enumerate(lines) if "Traceback (most recent call last)" in line]
    for line in lines[starts[0] + 1 :] if starts else []:
        text = line.partition("]: ")[2] if line.startswith("[rank") else line
        if text and not text.startswith((" ", "Traceback")):
            return text
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
