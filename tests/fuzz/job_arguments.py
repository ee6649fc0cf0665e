"""Random arguments of `titanlike launch` and `titanlike sweep`, and random sweep files.

What is accepted makes files that their programs parse, in which no line comes from an argument.
"""

import json
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import tomli
import yaml

from tests.forkserver import ROOT
from tests.fuzz.command_line import Outcome, run_argparse, train
from titanlike.config import UserError
from titanlike.tools.cli import main as titanlike_main
from titanlike.tools.clusters.slurm import SCRIPT
from titanlike.tools.sweep.config import METRICS, OWN_KEYS

DEBUG = ROOT / "train_configs/debug.toml"
INJECTED = (
    "a\n#SBATCH --account=x", "\nRUN id", "\ntouch x", "a\r\nb", "a\x85b", "a\u2028b", "a\x1b[2Jb", "\u202eb", "a\tb", "$(touch x)",
    "`touch x`", "; touch x", "a b", "'", "'; touch x; '", '"', "\\", "#", " # b", "{}", "{name}", "{0}", "%j", "a: b", "- a", "&a",
    "*a", "!!python/name:os", "---", "null", "yes", "1e3", "0x1", "~", "..", "ü", "🤖", "", "-", "--", "=", "a=b",
    "x" * 300, "@", "[",
)  # fmt: skip
IMAGES = (
    "image",
    "Host.example:5000/team/image:Tag",
    f"image@sha256:{'0' * 64}",
    "team/Image",
    "image:",
    "a//b",
    "-a",
    "a b",
)
NAMES = ("claim", "a-b.c", "Claim", "-a", "a-", "a..b", "a_b", "a" * 64, "a" * 254)
NUMBERS = ("1", "2", "8", "0", "-1", "²", "1.5", "", "99999999999")
TIMES = ("30", "24:00:00", "1-12", "1-12:30", "tomorrow", "1:", "-1", "\u0661:00")
SLURM = {
    "--nodes",
    "--ntasks-per-node",
    "--time",
    "--signal",
    "--requeue",
    "--open-mode",
    "--output",
    "--chdir",
    "--job-name",
}
SLURM |= {"--gpus-per-node", "--exclusive"}


def titanlike(words: list[str], folder: Path) -> Outcome:
    """Runs a command in this process."""
    outcome = run_argparse(titanlike_main.main, words, folder)
    assert all(line.isprintable() for line in outcome.output.split("\n")), ascii(outcome.output)
    return outcome


def text(rng: random.Random, *valid: str) -> str:
    """Returns a valid value, one that is injected, or both."""
    return rng.choice((rng.choice(valid), rng.choice(INJECTED), rng.choice(valid) + rng.choice(INJECTED)))


def run_here(program: Path, *arguments: str) -> str:
    """Replaces the new interpreter that resolves a recipe."""
    outcome = train(list(arguments), Path.cwd())
    if not outcome.accepted:
        raise UserError("\n".join(line.removeprefix("error: ") for line in outcome.errors.splitlines()))
    return outcome.output


def fake_wheel(folder: Path) -> str:
    """Replaces the build of the wheel, which takes seconds."""
    (folder / "titanlike-1-py3-none-any.whl").write_text("")
    return "titanlike-1-py3-none-any.whl"


def launch_case(rng: random.Random, folder: Path) -> None:
    """`titanlike launch`: recipes, programs and options with text that would be another line or another command."""
    target = rng.choice(("slurm", "kubernetes", "docker"))
    name = re.sub("[/\0]", "_", text(rng, "recipe"))[:100] + ".toml"
    lines = [f"extends = {json.dumps(str(DEBUG))}"]
    if rng.random() < 0.3:
        program = re.sub("[/\0]", "_", text(rng, "program"))[:100] + ".py"
        (folder / program).write_text((ROOT / "recipes/pretrain.py").read_text())
        lines.append(f"recipe = {json.dumps(program, ensure_ascii=False)}".replace("\x7f", "\\u007f"))
    for key, values in (
        ("run.name", ("run", "My_Run.1")),
        ("checkpoint.dir", ("", "s3://bucket/runs")),
        ("data.path", ("",)),
    ):
        if rng.random() < 0.2:
            lines.append(f"{key} = {json.dumps(text(rng, *values))}")
    (folder / name).write_text("\n".join(lines), encoding="utf-8")
    options: dict[str, list[str]] = {"--gpus-per-node": ["1"], "--nodes": ["1"]}
    if target == "kubernetes":
        options |= {"--image": ["image"], "--claim": ["claim"]}
    choices = {
        "--nodes": lambda: rng.choice(NUMBERS), "--gpus-per-node": lambda: rng.choice(NUMBERS), "--out": lambda: text(rng, "out"),
        "--hardware": lambda: text(rng, "h100", "cpu"), "--grace": lambda: rng.choice((*NUMBERS, "60", "180")),
        "--run.name": lambda: text(rng, "run"), "--run.dir": lambda: text(rng, "runs"), "--data.path": lambda: text(rng, "x"),
        "--recipe": lambda: text(rng, "pretrain"),
    }  # fmt: skip
    choices |= {
        "slurm": {"--time": lambda: rng.choice((*TIMES, *INJECTED)), "--sbatch": lambda: text(rng, "--partition=gpu", "--mem=1G")},
        "kubernetes": {
            "--image": lambda: rng.choice((*IMAGES, *INJECTED)), "--claim": lambda: rng.choice((*NAMES, *INJECTED)),
            "--secret": lambda: rng.choice((*NAMES, *INJECTED)), "--kind": lambda: rng.choice(("jobset", "trainjob", "a\nb")),
        },
        "docker": {"--image": lambda: rng.choice((*IMAGES, *INJECTED))},
    }[target]  # fmt: skip
    for option in rng.sample(list(choices), rng.choice((0, 1, 1, 2, 3))):
        options[option] = [choices[option]() for _ in range(rng.choice((1, 2)) if option == "--sbatch" else 1)]
    words = [
        "launch",
        target,
        name,
        "--dry-run",
        *(f"{key}={value}" for key, values in options.items() for value in values),
    ]
    with pytest.MonkeyPatch.context() as replaced:
        replaced.setattr("titanlike.tools.clusters.cluster_job.run_program", run_here)
        replaced.setattr("titanlike.tools.clusters.docker.build_wheel", fake_wheel)
        outcome = titanlike(words, folder)
    if not outcome.accepted:
        return
    submit = shlex.split(outcome.output.splitlines()[-1].removeprefix("to submit: "))
    {"slurm": check_slurm, "kubernetes": check_kubernetes, "docker": check_docker}[target](folder, submit, options)


def check_slurm(folder: Path, submit: list[str], options: dict[str, list[str]]) -> None:
    assert submit[0] == "sbatch" and len(submit) == 2
    file = Path(submit[1])
    content = file.read_text()
    assert subprocess.run(["bash", "-n", str(file)], check=False, capture_output=True).returncode == 0
    directives = [
        shlex.split(line.removeprefix("#SBATCH ")) for line in content.splitlines() if line.startswith("#SBATCH ")
    ]
    assert all(len(each) == 1 for each in directives), directives
    passed = options.get("--sbatch", [])
    own, others = directives[: len(directives) - len(passed)], directives[len(directives) - len(passed) :]
    assert {each[0].partition("=")[0] for each in own} <= SLURM and [each[0] for each in others] == passed
    assert f"--chdir={folder}" in [each[0] for each in own]
    (line,) = [line for line in content.splitlines() if line.startswith("srun ")]
    assert shlex.split(line)[-2:] == [str(file.with_name("recipe.toml")), "&"]
    # All other lines are those of the template.
    assert len(content.splitlines()) == SCRIPT.count("\n") + len(directives), content
    tomli.loads(file.with_name("recipe.toml").read_text())


def check_kubernetes(folder: Path, submit: list[str], options: dict[str, list[str]]) -> None:
    assert submit[:3] == ["kubectl", "apply", "--filename"] and len(submit) == 4
    manifests = list(yaml.safe_load_all((folder / submit[3]).read_text()))
    kinds = ["ConfigMap", *(["TrainingRuntime", "TrainJob"] if options.get("--kind") == ["trainjob"] else ["JobSet"])]
    assert [each["kind"] for each in manifests] == kinds
    for each in manifests:
        assert re.fullmatch("[a-z]([a-z0-9-]{0,61}[a-z0-9])?", each["metadata"]["name"])
    assert all(re.fullmatch("[-._a-zA-Z0-9]+", key) for key in manifests[0]["data"])
    tomli.loads(manifests[0]["data"]["recipe.toml"])
    texts = str(manifests[1])
    assert f"'image': {options['--image'][0]!r}" in texts
    assert not options["--claim"][0] or f"'claimName': {options['--claim'][0]!r}" in texts


def check_docker(folder: Path, submit: list[str], options: dict[str, list[str]]) -> None:
    image = options.get("--image", ["titanlike"])[0]
    assert submit[:4] == ["docker", "build", "--tag", image] and len(submit) == 5
    lines = (folder / submit[4] / "Dockerfile").read_text().splitlines()
    instructions = [line.split()[0] for line in lines if line and not line.startswith("#")]
    order = "ARG FROM RUN ARG ARG RUN ARG COPY RUN RUN COPY USER WORKDIR ENTRYPOINT CMD"
    assert instructions == order.split()
    (copied,) = [line.split() for line in lines if line.startswith("COPY recipe.toml")]
    assert len(copied) == 4 and (folder / submit[4] / copied[2]).is_file()
    tomli.loads((folder / submit[4] / "recipe.toml").read_text())


# Sweeps.

LITERALS = (
    "1",
    "0.1",
    "-1",
    "true",
    "nan",
    "inf",
    "1e400",
    "[]",
    "{}",
    "[1, 2]",
    '"a"',
    "2024-01-01",
    '"a\\nb"',
    '"\\u001b[2J"',
    "0",
)
KEYS = (
    "optimizer.lr",
    "schedule.warmup_steps",
    "training.steps",
    "optimizer.weight_decay",
    "model.dim",
    "data.path",
    "seed",
    "run",
)
SWEEP_KEYS = (
    "name", "dir", "recipe", "trials", "metric", "direction", "seed", "startup_trials", "pruning.pruner", "pruning.warmup_steps",
    "resources.backend", "resources.parallel", "resources.gpus_per_trial", "resources.processes_per_trial", "resources.options",
    "search", "pruning", "nosuchkey",
)  # fmt: skip


def quoted(value: str) -> str:
    """Returns a TOML string."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def dimension(rng: random.Random) -> str:
    """Returns the table of a search space."""
    key = rng.choice((*KEYS, *OWN_KEYS, rng.choice(INJECTED))) if rng.random() < 0.4 else rng.choice(KEYS[:4])
    number = lambda: rng.choice(("1", "2", "10", "0.001", "0.1", rng.choice(LITERALS)))  # noqa: E731
    body = {
        "values": f"values = [{', '.join(rng.choice((number(), quoted(text(rng, 'a')))) for _ in range(rng.randint(0, 3)))}]",
        "range": f"low = {number()}\nhigh = {number()}"
        + rng.choice(("", "\nlog = true", "\nstep = 1", "\nstep = 0.1")),
        "odd": rng.choice(("low = 1", "values = 3", "log = 3", "x = 1", "")),
    }[rng.choice(("values", "values", "range", "range", "range", "odd"))]
    return f"[search.{quoted(key) if rng.random() < 0.8 else key}]\n{body}"


def sweep_case(rng: random.Random, folder: Path) -> None:
    """Sweep files, their keys on the command line, and directories of sweeps whose results are anything."""
    if rng.random() < 0.15:
        junk = rng.choice(
            ("", "{}", "[]", "null", "[" * 10_000, '{"trials": [{}]}', '{"trials": 1}', "\0", '"\\ud800"', "nan")
        )
        trial = {
            "trial": 0,
            "value": rng.choice((1.0, None, "a")),
            "settings": {"a": text(rng, "1")},
            "step": 1,
            "state": "failed",
        }
        trial["reason"] = text(rng, "failed")
        results = {"metric": text(rng, "loss"), "trials": [trial], "importance": {text(rng, "a"): 1.0}}
        (folder / "sweep.json").write_text(rng.choice((junk, json.dumps(results))))
        titanlike(["sweep", ".", *rng.sample(["--table", "--dry-run", "--x"], rng.choice((0, 1)))], folder)
        return
    values: dict[str, str] = {"recipe": quoted(str(DEBUG))}
    odd = {
        "name": lambda: quoted(text(rng, "a")), "dir": lambda: quoted(text(rng, "runs")),
        "recipe": lambda: quoted(text(rng, "x.toml")),
        "metric": lambda: quoted(rng.choice((*METRICS, "evaluation/a", text(rng, "los")))),
        "resources.options": lambda: f"[{quoted(text(rng, '--instances=1'))}]",
        "resources.backend": lambda: quoted(rng.choice(("local", "ray", "slurm"))),
    }  # fmt: skip
    for key in rng.sample(SWEEP_KEYS, rng.choice((0, 0, 1, 2))):
        values[key] = odd.get(key, lambda: rng.choice(LITERALS))()
    tables = "\n".join(dimension(rng) for _ in range(rng.choice((0, 1, 1, 2, 3))))
    file = re.sub("[/\0]", "_", rng.choice(("sweep", "sweep", text(rng, "a"))))[:100] + ".toml"
    content = "\n".join(f"{key} = {value}" for key, value in values.items()) + f"\n{tables}"
    if rng.random() < 0.1:
        position = rng.randrange(len(content))
        content = content[:position] + rng.choice(INJECTED) + content[position + rng.randint(0, 3) :]
    (folder / file).write_text(content, encoding="utf-8")
    words = [
        f"--{rng.choice(SWEEP_KEYS)}={rng.choice((*LITERALS, *INJECTED))}" for _ in range(rng.choice((0, 0, 0, 1, 2)))
    ]
    with patch("titanlike.tools.sweep.config.run_program", lambda program, *arguments: run_here(program, *arguments)):
        outcome = titanlike(["sweep", file, "--dry-run", *words], folder)
    if outcome.accepted:
        *_, last = outcome.output.splitlines()
        command = shlex.split(last.removeprefix("command "))
        assert command[0] == sys.executable and command[2].endswith("recipe.toml")
        assert all(word.startswith("--") and "=" in word for word in command[3:]), command
