"""Jobs of an estimator that the user wrote: the start commands of both SageMaker SDKs, emulated, with their environment.

SDK v2's `PyTorch` estimator starts the script through the sagemaker-training toolkit, SDK v3's `ModelTrainer` through its
`Torchrun` driver. Both pass hyperparameters as `--key value`: the first as `str(value)`, the second as JSON, without a
PYTHONPATH, and with `__` for the point of a key. `tests/sdk` compares the requests.
"""

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.forkserver import Forked
from tests.launching import ROOT, SMALL, descendants, environment, free_port, losses, wait_for
from tests.programs import blocks
from titanlike.config import UserError
from titanlike.distributed.environment import RankInfo
from titanlike.distributed.sagemaker import SageMakerJob, sagemaker_job
from titanlike.recipe import PretrainRecipe, load
from titanlike.run.start import Arguments, start

RECIPE = "train_configs/debug.toml"
HYPERPARAMETERS: dict[str, Any] = {
    "recipe": "own_configs/tiny.toml", **SMALL, "training.steps": 60, "optimizer.lr": 1.5e-3, "run.deterministic": False,
    "checkpoint.enabled": True, "checkpoint.interval": 10, "checkpoint.export": "float32", "optimizer.groups": [],
    "data.source": "stream", "validation.interval": 30, "metrics.trackers": ["tensorboard"],
}  # fmt: skip
JOB = "pytorch-training-2026-11-22-10-11-12-345"
SM_VARIABLES = {
    "SM_CURRENT_HOST": "algo-1", "SM_HOSTS": '["algo-1"]', "SM_NUM_GPUS": "0", "SM_MODULE_NAME": "pretrain",
    "SM_HPS": json.dumps(HYPERPARAMETERS), "TRAINING_JOB_NAME": JOB,
}  # fmt: skip


def words(sdk: str) -> list[str]:
    """Returns the hyperparameters as the SDK's start command has them."""
    pairs: list[str] = []
    if sdk == "v2":
        for key, value in sorted(HYPERPARAMETERS.items()):
            pairs += [f"--{key}", str(json.loads(json.dumps(value)))]
        return pairs
    for key, value in HYPERPARAMETERS.items():
        pairs += [f"--{key.replace('.', '__')}", value if isinstance(value, str) else json.dumps(value)]
    return pairs


def opt_ml(folder: Path) -> Path:
    """Returns a host's /opt/ml as SageMaker prepares it, with two channels and a TensorBoardOutputConfig."""
    base = folder / "opt/ml"
    for name in ("model", "input/config", "input/data/train", "input/data/validation", "output"):
        (base / name).mkdir(parents=True)
    for name, document in (("train", "The quick brown fox. "), ("validation", "The lazy dog. ")):
        (base / f"input/data/{name}/part.txt").write_text(500 * document)
    # SageMaker's file has all values as text.
    encoded = {key: json.dumps(value) for key, value in HYPERPARAMETERS.items()}
    (base / "input/config/hyperparameters.json").write_text(json.dumps(encoded))
    output = {"S3OutputPath": "s3://bucket/tensorboard", "LocalPath": str(base / "output/tensorboard")}
    (base / "input/config/tensorboardoutputconfig.json").write_text(json.dumps(output))
    return base


def start_job(sdk: str, code: Path, base: Path, *, real: bool = False) -> "subprocess.Popen[str]":
    """Runs a job's start command in its copy of the source directory, with two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc_per_node=2"]
    if sdk == "v2":
        command += ["--master_addr=127.0.0.1", f"--master_port={free_port()}", "--node_rank=0"]
    else:
        command += [f"--master_port={free_port()}"]  # of a container, where 29500 is free
    variables = SM_VARIABLES | {"SM_MODEL_DIR": str(base / "model"), "SAGEMAKER_BASE_DIR": str(base)}
    for name in ("train", "validation"):
        variables[f"SM_CHANNEL_{name.upper()}"] = str(base / "input/data" / name)
    variables["OMP_NUM_THREADS"] = "1"
    variables["PYTHONPATH"] = str(code) if sdk == "v2" else ""
    return (subprocess.Popen if real else Forked)(
        [*command, "recipes/pretrain.py", *words(sdk)], cwd=code, env=environment(**variables), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def interrupt(sdk: str, job: "subprocess.Popen[str]") -> str:
    """Ends a job as SageMaker does if the start script forwards its signal, and if it does not. Returns the job's output."""
    if sdk == "v2":
        job.send_signal(signal.SIGTERM)
    else:
        for process in descendants(job.pid):
            os.kill(process, signal.SIGKILL)
    output, errors = job.communicate(timeout=300)
    assert job.returncode, errors
    return output


def source_dir(folder: Path, *, copied: bool) -> Path:
    """Returns the source directory as the job gets it, with a recipe of the user's. A forked process has imported the library."""
    code = folder / "code"
    (code / "own_configs").mkdir(parents=True)
    for name in ("titanlike", "recipes", "train_configs"):
        if copied:
            shutil.copytree(ROOT / name, code / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (code / name).symlink_to(ROOT / name)
    (code / "own_configs/tiny.toml").write_text('extends = "../train_configs/debug.toml"\nmodel.vocab_size = 300\n')
    return code


@pytest.mark.parametrize(
    ("sdk", "real"),
    [
        ("v3", False),
        pytest.param("v2", True, marks=pytest.mark.slow),
    ],
    ids=["v3-forked", "v2-real"],
)
def test_an_interrupted_job_and_the_next_one_that_resumes_it(sdk: str, real: bool, tmp_path: Path) -> None:
    code, base = source_dir(tmp_path, copied=real), opt_ml(tmp_path)
    run, events = base / "checkpoints/tiny", base / "output/tensorboard/tiny"
    job = start_job(sdk, code, base, real=real)
    wait_for(run / "checkpoints/step-00000020/manifest.json", 300)
    while not any(file.stat().st_size for file in events.glob("*")):  # during the job
        assert job.poll() is None, job.communicate()
        time.sleep(0.02)
    output = interrupt(sdk, job)
    assert "/pretrain.py, recipe own_configs/tiny.toml\n" in output
    resolved = (run / "recipe.toml").read_text()
    assert "vocab_size = 300\n" in resolved and "steps = 60\n" in resolved and "deterministic = false\n" in resolved
    assert f'path = "{base}/input/data/train"\n' in resolved
    assert f'validation_path = "{base}/input/data/validation"\n' in resolved
    if real:  # the library of the job's source directory: the installed one has a git commit
        assert json.loads((run / "environment.json").read_text())["git_commit"] is None
    saved = sorted(
        int(path.name[5:]) for path in (run / "checkpoints").glob("step-*") if (path / "manifest.json").exists()
    )
    assert 20 <= saved[-1] < 60
    assert ("stopped by SIGTERM" in output) == (sdk == "v2")

    if sdk == "v3":  # SageMaker has not uploaded all files of the newest checkpoint
        next((run / f"checkpoints/step-{saved.pop():08}").glob("*.safetensors")).unlink()

    next_job = start_job(sdk, source_dir(tmp_path / "second", copied=real), base, real=real)
    output, errors = next_job.communicate(timeout=300)
    assert next_job.returncode == 0, errors
    assert f"resumed at step {saved[-1]}" in output
    assert (
        f"weights {run}/checkpoints" in output and "next    titanlike" not in output
    )  # not on the machine of the reader
    found = losses(run)
    assert sorted(found) == [*range(1, 61)] and found[60] < found[1] - 1
    assert list((base / "model/hf").glob("*.safetensors")) and (base / "model/hf/config.json").exists()
    assert not (run / "hf").exists() and not (code / "runs").exists() and not (run / "tensorboard").exists()
    accumulator = EventAccumulator(str(events))
    accumulator.Reload()
    assert accumulator.Scalars("train/loss")[-1].step == 60
    assert [event.step for event in accumulator.Scalars("validation/loss")][-1] == 60


def test_a_program_finds_the_library_beside_it_without_an_install(tmp_path: Path) -> None:
    code = source_dir(tmp_path, copied=True)
    usage = code / "titanlike/config/help.py"
    usage.write_text(usage.read_text().replace("usage: {command}", "usage: of the copy", 1))
    done = subprocess.run(
        [sys.executable, "recipes/pretrain.py", "--help"], cwd=code, env=environment(PYTHONPATH=""), capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.stdout.startswith("usage: of the copy"), done.stderr


def test_the_directories_of_a_job(tmp_path: Path) -> None:
    assert sagemaker_job({}) is None
    variables = {"SM_MODEL_DIR": "/opt/ml/model"}
    assert sagemaker_job(variables) == SageMakerJob("/opt/ml/checkpoints", "/opt/ml/model")
    found = sagemaker_job(variables | {"SM_CHANNEL_TRAINING": "/a", "SM_CHANNEL_VALIDATION": "/b"})
    assert found and (found.train, found.validation) == ("/a", "/b")
    config = tmp_path / "input/config"
    config.mkdir(parents=True)
    variables |= {"SAGEMAKER_BASE_DIR": str(tmp_path), "SM_CHANNEL_TRAIN": "/c", "TRAINING_JOB_NAME": JOB}
    (config / "hyperparameters.json").write_text('{"recipe": "x.toml"}')
    (config / "tensorboardoutputconfig.json").write_text('{"S3OutputPath": "s3://bucket/tensorboard"}')
    found = sagemaker_job(variables)
    assert found == SageMakerJob(
        f"{tmp_path}/checkpoints", "/opt/ml/model", tensorboard=f"{tmp_path}/output/tensorboard", train="/c"
    )
    (config / "hyperparameters.json").write_text('{"recipe": "x.toml", "_tuning_objective_metric": "validation_loss"}')
    elsewhere = tmp_path / "tensorboard.json"
    elsewhere.write_text('{"LocalPath": "/d"}')
    found = sagemaker_job(variables | {"TENSORBOARD_CONFIG_FILE_PATH": str(elsewhere)})
    assert found and (found.tensorboard, found.tuned) == ("/d", JOB)


def test_names_of_hyperparameters() -> None:
    words = [
        "--recipe", "own.toml", "--training__local_batch_size", "8", "--run.name", "a__b", "--_tuning_objective_metric", "loss",
    ]  # fmt: skip
    arguments = Arguments([*words, "--sagemaker_torch_distributed_enabled", "true", "--evaluation.x__y", "1"])
    assert str(arguments.recipe) == "own.toml"
    assert arguments.overrides == {"training.local_batch_size": "8", "run.name": "a__b", "evaluation.x__y": "1"}


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Makes this process one of a SageMaker job. Returns the directory of its configuration."""
    monkeypatch.setenv("SM_MODEL_DIR", "/opt/ml/model")
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path))
    monkeypatch.setenv("TRAINING_JOB_NAME", JOB)
    config = tmp_path / "input/config"
    config.mkdir(parents=True)
    return config


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        ((), ('path = "/c/train"', 'validation_path = "/c/validation"', 'name = "mine"')),
        (("--run.dir=elsewhere",), ('name = "mine"', 'dir = "elsewhere"')),
        (("--run.name=other",), ('name = "other"',)),
        (("--data.path=/mine",), ('path = "/mine"', 'validation_path = "/c/validation"')),
        (("--data.mixture=['/c/train/a', '/c/train/b']",), ('path = ""', 'mixture = ["/c/train/a", "/c/train/b"]')),
    ],
)
def test_channels_are_data_paths(
    words: tuple[str, ...], lines: tuple[str, ...], job: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """They and the job's directories take precedence over the recipe's, and hyperparameters over both."""
    recipe = job / "own.toml"
    path = "" if words and "mixture" in words[0] else 'path = "data/here"\n'
    recipe.write_text(f'extends = "{ROOT}/{RECIPE}"\nrun.name = "mine"\n[data]\nsource = "shards"\n{path}')
    for name in ("train", "validation"):
        monkeypatch.setenv(f"SM_CHANNEL_{name.upper()}", f"/c/{name}")
    with pytest.raises(SystemExit):
        start(PretrainRecipe, [str(recipe), *words, "--resolved"])
    resolved = capsys.readouterr().out.splitlines()
    assert {*lines} <= {*resolved}
    assert (f'dir = "{job.parents[1]}/checkpoints"' in resolved) == ("--run.dir=elsewhere" not in words)


def test_the_jobs_of_a_tuner_do_not_share_a_run(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of them have the same checkpoint location."""
    monkeypatch.setattr(sys, "argv", [str(ROOT / "recipes/pretrain.py")])
    (job / "hyperparameters.json").write_text('{"_tuning_objective_metric": "validation_loss"}')
    words = [f"--recipe={ROOT}/{RECIPE}", "--optimizer.lr", "0.00123", "--_tuning_objective_metric", "validation_loss"]
    with pytest.raises(SystemExit):
        start(PretrainRecipe, [*words, "--resolved"])
    resolved = capsys.readouterr().out
    assert f'name = "debug-{JOB}"\n' in resolved and "lr = 0.00123\n" in resolved
    with pytest.raises(SystemExit):
        start(PretrainRecipe, [*words, "--run.name=mine"])
    assert "run.name = 'mine' is the same in all jobs of the tuner" in capsys.readouterr().err


def test_checkpoints_on_the_disks_of_several_hosts_are_refused() -> None:
    job = SageMakerJob("/opt/ml/checkpoints", "/opt/ml/model")
    hosts, one = RankInfo(world_size=4, local_world_size=2), RankInfo(world_size=2, local_world_size=2)
    keys = {"run.dir": "/opt/ml/checkpoints", "checkpoint.dir": ""}
    local = load(PretrainRecipe, ROOT / RECIPE, keys)
    with pytest.raises(UserError, match=r"disk of each host.*set --checkpoint\.dir=s3://BUCKET/PREFIX"):
        job.check_checkpoints(local.run, local.checkpoint, hosts)
    job.check_checkpoints(local.run, local.checkpoint, one)
    for changes in ({"checkpoint.dir": "s3://bucket/runs"}, {"checkpoint.enabled": "false"}, {"run.dir": "/fsx"}):
        other = load(PretrainRecipe, ROOT / RECIPE, keys | changes)
        job.check_checkpoints(other.run, other.checkpoint, hosts)


@pytest.mark.parametrize("source", ["docs/sagemaker.md", "sagemaker/estimator.py"])
def test_the_first_examples_have_a_location_for_the_checkpoints_of_several_instances(source: str) -> None:
    text = (ROOT / source).read_text()
    program = blocks(ROOT / source, "python")[0] if source.endswith(".md") else text
    calls = [node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Call)]
    keywords = {each.arg: each.value for call in calls for each in call.keywords}
    assert ast.literal_eval(keywords["instance_count"]) == 4
    words = [
        word
        for pair in ast.literal_eval(keywords["hyperparameters"]).items()
        for word in (f"--{pair[0]}", str(pair[1]))
    ]
    arguments = Arguments(words)
    job = SageMakerJob("/opt/ml/checkpoints", "/opt/ml/model")
    keys = {"run.dir": job.checkpoints, "run.name": "llama3_8b", **arguments.overrides}
    recipe = load(PretrainRecipe, ROOT / arguments.recipe, keys)
    job.check_checkpoints(recipe.run, recipe.checkpoint, RankInfo(world_size=32, local_world_size=8))
