"""Records what a new user sees: terminals of a clone, of the wheel in an empty folder, and of SageMaker jobs, in docs/captures.

    python -m docs.captures clone --tests               a clone and its two commands; without --tests, the first
    python -m docs.captures wheel                       the wheel in an empty folder
    python -m docs.captures estimator_v2 --sdk PYTHON   an estimator of SDK v2: its request, and its job, killed and resumed
    python -m docs.captures estimator_v3 --sdk PYTHON   the same with SDK v3

Each uses a new virtual environment, in which pip installs everything. With `--packages FOLDER`, it finds what is installed there,
and pip installs the rest. PYTHON is that of an environment with the SDK and moto, which stands for AWS (`.ci/run` creates one).
"""

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

from tests.cloud import test_own_estimators as jobs
from tests.launching import ROOT, descendants, environment, wait_for
from tests.programs import INSTALLED, blocks

FOLDER = ROOT / "docs/captures"
KEYS = {
    "recipe": "train_configs/debug.toml", "training.steps": 40, "training.global_batch_size": 4, "training.local_batch_size": 2,
    "checkpoint.interval": 10, "validation.interval": 0, "sample.tokens": 0,
}  # fmt: skip
# Runs the estimator of docs/sagemaker.md or sagemaker/estimator.py, and prints the request that the SDK sends to an emulated AWS.
REQUEST = """
import json, sys
from moto import mock_aws
mock_aws().start()
import boto3
boto3.setup_default_session(region_name="us-east-1")
def show(params, **_):
    print("REQUEST" + json.dumps(params, indent=2, default=str), flush=True)
boto3.DEFAULT_SESSION.events.register("provide-client-params.sagemaker.CreateTrainingJob", show)
exec(sys.stdin.read(), {"ROLE": "arn:aws:iam::123456789012:role/training"})
"""

# Programs of packages that pip does not install, because they are there.
SCRIPTS = (("torchrun", "torch.distributed.run", "main"), ("pytest", "pytest", "console_main"))
# Progress of pip.
PIP = re.compile(
    r" *(Requirement already|Checking|Processing|Obtaining|Collecting|Downloading|Using cached|Installing|Preparing|Getting"
    r"|Building|Created|Stored|Attempting|Found existing|Uninstalling|Successfully (built|unin)|Looking in|━|WARNING|\[notice)"
)


class Terminal:
    """Runs lines in a folder as they are typed, with the programs of an environment, and keeps what they print."""

    def __init__(self, base: Path, packages: Path | None) -> None:
        self.home, self.venv = base, base / "venv"
        venv.create(self.venv, with_pip=True)
        if packages:
            (site,) = self.venv.glob("lib/python*/site-packages")
            (site / "packages.pth").write_text(f"{packages.resolve()}\n")
            for name, module, call in SCRIPTS:
                script = self.venv / "bin" / name
                script.write_text(
                    f"#!{self.venv}/bin/python\nimport sys\nfrom {module} import {call}\nsys.exit({call}())\n"
                )
                script.chmod(0o755)
        self.folder = base
        self.lines: list[str] = []

    def environment(self, **variables: str) -> dict[str, str]:
        """Returns an environment without PYTHONPATH."""
        found = environment(PATH=f"{self.venv}/bin:/usr/bin:/bin", HOME=str(self.home), **variables)
        found.pop("PYTHONPATH", None)
        return found

    def run(self, line: str, code: int = 0) -> str:
        """Types a line and waits for its end."""
        done = subprocess.run(
            ["bash", "-c", line], cwd=self.folder, env=self.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout
        self.show(f"$ {line}", done.stdout)
        return done.stdout

    def show(self, *texts: str) -> None:
        """Adds lines."""
        for text in texts:
            self.lines += text.rstrip("\n").splitlines() or [""]

    def text(self) -> str:
        """Returns the lines without the temporary folder, pip's progress and most steps."""
        kept: list[str] = []
        for line in self.lines:
            is_pip = PIP.match(line)
            step = re.match(r"step +(\d+)/\d+  loss", line)
            if is_pip or (step and int(step[1]) % 10 and int(step[1]) > 5):
                kept += ["..."] * (kept[-1] != "...")
            else:
                kept.append(line.replace(str(self.home), "~"))
        return "\n".join(kept) + "\n"


def clone(terminal: Terminal, *, tests: bool) -> None:
    """The two commands of the README. The second one runs the tests."""
    terminal.show("$ git clone https://HOST/titanlike && cd titanlike")
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(terminal.home / "titanlike")], check=True)
    terminal.folder = terminal.home / "titanlike"
    train, test = (line for block in blocks(ROOT / "README.md")[:2] for line in block.splitlines())
    terminal.run(train)
    if tests:
        terminal.run(test)


def wheel(terminal: Terminal) -> None:
    """Builds the wheel in a clone, and uses it in an empty folder: with a shipped recipe, and with a copy that is changed."""
    source, terminal.folder = terminal.home / "titanlike", terminal.home / "empty"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(source)], check=True)
    subprocess.run(
        ["bash", "-c", INSTALLED[0]], cwd=source, env=terminal.environment(), check=True, capture_output=True
    )
    terminal.folder.mkdir()
    (built,) = (source / "dist").iterdir()
    built.rename(terminal.folder / built.name)
    terminal.run("ls")
    terminal.run(INSTALLED[1].strip())
    terminal.run("titanlike recipes copy debug custom/mine.toml")
    terminal.run(
        """sed -i 's/optimizer.step()/optimizer.step(); step == 1 and print("a line of mine")/' custom/mine.py"""
    )
    terminal.run("grep -n 'a line of mine' custom/mine.py")
    terminal.run("NPROC=2 titanlike train custom/mine.toml --parallelism.tensor=2 --training.steps=40 --run.name=mine")
    terminal.run("ls . runs")


def estimator(terminal: Terminal, sdk: str, python: Path) -> None:
    """The request of the estimator, and a job of the debug recipe with the SDK's start command, killed and resumed."""
    source = terminal.folder = terminal.home / "titanlike"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(source)], check=True)
    page = ROOT / ("sagemaker/estimator.py" if sdk == "v3" else "docs/sagemaker.md")
    block = page.read_text() if sdk == "v3" else blocks(page, "python")[0]
    terminal.show(f"The estimator of {page.relative_to(ROOT)}, up to the request:", "", *indented(block), "")
    sent = block.replace(".fit(", ".fit(wait=False, inputs=").replace(").train(", ").train(wait=False, logs=False, ")
    account = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    given = terminal.environment(**account, SAGEMAKER_VALIDATE_ROLE="false")
    done = subprocess.run(
        [python, "-c", REQUEST], cwd=source, env=given, input=sent, capture_output=True, text=True, check=False
    )
    assert "REQUEST" in done.stdout, done.stderr
    request, _ = json.JSONDecoder().raw_decode(done.stdout.partition("REQUEST")[2])
    terminal.show(*indented(json.dumps(request, indent=2)), "")

    jobs.HYPERPARAMETERS = KEYS
    base = jobs.opt_ml(terminal.home)
    code = base / ("code" if sdk == "v2" else "input/data/code")
    source.rename(code)
    terminal.folder = code
    terminal.show("In the job's container, with 2 processes and the debug recipe:", "")
    terminal.run("pip install -r requirements.txt")
    for is_killed in (True, False):
        job, line = start_job(terminal, sdk, code, base)
        if is_killed:
            wait_for(base / "checkpoints/debug/checkpoints/step-00000020/manifest.json", 600)
            time.sleep(2)
            for process in descendants(job.pid):
                os.kill(process, 9)
        output, _ = job.communicate(timeout=1200)
        assert bool(job.returncode) == is_killed, output
        terminal.show(f"$ {line}", output)
        if is_killed:
            terminal.show("", "The host is taken away (SIGKILL). The next job with the same checkpoints:", "")


def start_job(terminal: Terminal, sdk: str, code: Path, base: Path) -> "tuple[subprocess.Popen[str], str]":
    """Starts the command of the SDK's start script."""
    words = ["torchrun", "--nnodes=1", "--nproc_per_node=2", "recipes/pretrain.py", *jobs.words(sdk)]
    variables = jobs.SM_VARIABLES | {
        "SM_MODEL_DIR": str(base / "model"), "SAGEMAKER_BASE_DIR": str(base), "OMP_NUM_THREADS": "1",
        "SM_HPS": json.dumps(KEYS),
    }  # fmt: skip
    given = terminal.environment(**variables)
    job = subprocess.Popen(
        words, cwd=code, env=given, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        executable=str(terminal.venv / "bin/torchrun"), start_new_session=True,
    )  # fmt: skip
    return job, shlex.join(words)


def indented(text: str) -> list[str]:
    """Returns the lines of a text as a block of a page shows them."""
    return [f"    {line}".rstrip() for line in text.splitlines()]


def main() -> None:
    """Records the captures that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=["clone", "wheel", "estimator_v2", "estimator_v3"])
    parser.add_argument("--tests", action="store_true", help="clone: run the tests, too")
    parser.add_argument("--packages", type=Path, help="folder with installed packages")
    parser.add_argument("--sdk", type=Path, metavar="PYTHON", help="of an environment with the SDK and moto")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        terminal = Terminal(Path(folder), options.packages)
        if options.name == "clone":
            clone(terminal, tests=options.tests)
        elif options.name == "wheel":
            wheel(terminal)
        else:
            assert options.sdk, "--sdk is missing: the Python of an environment with the SDK"
            estimator(terminal, options.name.removeprefix("estimator_"), options.sdk)
        text = terminal.text()
    present = ", with torch and the other dependencies already in the environment" if options.packages else ""
    shown = f"{options.name}{' --tests' if options.tests else ''}"
    machine = f"{os.cpu_count()} CPU cores, Linux, Python {platform.python_version()}"
    heading = (
        f"Recorded by `python -m docs.captures {shown}` on {time.strftime('%Y-%m-%d')}, on {machine}{present}.\n\n"
    )
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{options.name}.txt").write_text(heading + text)
    print(f"{FOLDER / options.name}.txt", file=sys.stderr)


if __name__ == "__main__":
    main()
