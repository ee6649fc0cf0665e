"""What runs first on every host of a SageMaker job: finds its place among the hosts, starts the training, tells what went wrong.

Nothing but Python's own library here: what the training needs is looked for, and installed if it is missing, before it starts.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(os.environ.get("SAGEMAKER_BASE_DIR", "/opt/ml"))
CODE = Path(__file__).resolve().parents[1]
STOPPED = (128 + signal.SIGTERM, 128 + signal.SIGINT)  # saved and left, as it was told
# What a process says whose partner on another host is gone.
BEREFT = (
    "Connection closed by peer",
    "Connection reset by peer",
    "ncclRemoteError",
    "remote process exited",
    "Broken pipe",
)
# What `--smoke` trains: enough to have compiled, and to see the speed.
BRIEFLY = (
    "--training.steps=20", "--schedule.decay_steps=0", "--metrics.interval=1", "--validation.interval=0", "--sample.tokens=0",
    "--checkpoint.enabled=false",
)  # fmt: skip
SHOWN = 1024  # characters of the failure file that SageMaker shows


def main(words: list[str]) -> int:
    """Run the job's share of this host. Returns the exit code."""
    # The first process of a container hears no signal that it has no ear for.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    smoke = words[:1] == ["--smoke"]
    host, variables = place(json.loads((ROOT / "input/config/resourceconfig.json").read_text()))
    environment = {**variables, **os.environ, "PYTHONPATH": str(CODE), "PYTHONUNBUFFERED": "1"}
    problem = install(CODE / "requirements.txt")
    if problem:
        return fail(host, [f"error: {problem}"], 2)
    train = str(CODE / "titanlike/cli/launch.py")
    programs = [[str(CODE / "sagemaker/smoke.py")], [train, *words[1:], *BRIEFLY]] if smoke else [[train, *words]]
    for program in programs:
        code, last = run([sys.executable, *program], environment)
        if code:
            return code if code in STOPPED else fail(host, last, code)
    return 0


def place(config: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """This host's name, and what torchrun has to know of the hosts: the first in order is where they meet."""
    hosts, host = sorted(config["hosts"]), config["current_host"]
    interface = config.get("network_interface_name", "eth0")
    return host, {
        "NNODES": str(len(hosts)),
        "NODE_RANK": str(hosts.index(host)),
        "MASTER_ADDR": hosts[0],
        "NCCL_SOCKET_IFNAME": interface,
        "GLOO_SOCKET_IFNAME": interface,
    }


def install(requirements: Path) -> str:
    """Install what the image lacks, and keep its torch. Returns what is wrong, if anything is."""
    missing = lacking(requirements.read_text().split())
    torch = next((line for line in missing if line.startswith("torch>")), None)
    if torch:
        return f"the image has no {torch}; choose another --image"
    if not missing:
        return ""
    print(f"installing {', '.join(missing)}", flush=True)
    kept = ROOT / "input/constraints.txt"
    kept.write_text(f"torch=={metadata.version('torch')}\n")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "-r", str(requirements), "-c", str(kept)]
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        words = " ".join(done.stderr.split())[-500:]
        return f"the image lacks {', '.join(missing)}, and they cannot be installed here; give an --image that has them: {words}"
    return ""


def lacking(wanted: list[str]) -> list[str]:
    """Those of the requirements that are not installed, or in another version."""
    from pip._vendor.packaging.requirements import Requirement

    found = []
    for line in wanted:
        requirement = Requirement(line)
        try:
            version = metadata.version(requirement.name).partition("+")[0]
        except metadata.PackageNotFoundError:
            found.append(line)
        else:
            if not requirement.specifier.contains(version, prereleases=True):
                found.append(line)
    return found


def run(command: list[str], environment: dict[str, str]) -> tuple[int, list[str]]:
    """Run a program, pass on what it says and what we are told. Returns its exit code and its last words."""
    last: deque[str] = deque(maxlen=400)
    process = subprocess.Popen(command, env=environment, cwd=CODE, stderr=subprocess.PIPE, text=True, errors="replace")

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    # SageMaker stops a container by SIGTERM to its first process, which is this one, and waits for 120 seconds.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)

    def read() -> None:
        assert process.stderr
        for line in process.stderr:
            sys.stderr.write(line)
            sys.stderr.flush()
            last.append(line.rstrip())

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    code = process.wait()
    reader.join(timeout=5)  # a grandchild may hold the pipe open
    return (code if code >= 0 else 128 - code), list(last)


def fail(host: str, last: list[str], code: int) -> int:
    """Leave the cause where SageMaker looks for it: the start of the file is what a user is shown."""
    said = [line.removeprefix("error: ") for line in last if line.startswith("error: ")]
    raised = exception(last)
    cause = "; ".join(dict.fromkeys([raised, *said] if raised else said)) or f"the training ended with exit code {code}"
    if any(word in cause for word in BEREFT):
        cause = f"lost another host, whose own failure file says why: {cause}"
    rest = "\n".join(last)
    text = f"{host}: {cause}"[: SHOWN - 1]
    (ROOT / "output").mkdir(parents=True, exist_ok=True)
    (ROOT / "output/failure").write_text(f"{text}\n\n{rest}\n")
    print(f"error: {text}", file=sys.stderr, flush=True)
    return code


def exception(lines: list[str]) -> str:
    """The last line of the first stack trace: what follows may be of others, who lost the one that failed."""
    marks = [i for i, line in enumerate(lines) if "Traceback (most recent call last)" in line]
    for line in lines[marks[0] + 1 :] if marks else []:
        plain = line.partition("]: ")[2] if line.startswith("[rank") else line
        if plain and not plain.startswith((" ", "Traceback")):
            return plain
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
