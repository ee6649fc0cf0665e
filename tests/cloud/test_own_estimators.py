"""Jobs of an estimator that the user wrote: the start commands of both SageMaker SDKs, emulated, with their environment.

SDK v2's `PyTorch` estimator starts the script through the sagemaker-training toolkit, SDK v3's `ModelTrainer` through its
`Torchrun` driver. Both pass hyperparameters as `--key value`: the first as `str(value)`, the second as JSON, without a
PYTHONPATH.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.forkserver import Forked
from tests.launching import ROOT, SMALL, environment, free_port
from titanlike.distributed.environment import RankInfo, sagemaker_paths

RECIPE = "train_configs/debug.toml"
HYPERPARAMETERS: dict[str, Any] = {
    "recipe": "own_configs/tiny.toml", **SMALL, "training.steps": 4, "optimizer.lr": 1.5e-3, "run.deterministic": False,
    "checkpoint.enabled": True, "checkpoint.export": "float32", "optimizer.groups": [],
}  # fmt: skip
SM_VARIABLES = {
    "SM_CURRENT_HOST": "algo-1", "SM_HOSTS": '["algo-1"]', "SM_NUM_GPUS": "0", "SM_MODULE_NAME": "pretrain",
    "SM_HPS": json.dumps(HYPERPARAMETERS), "TRAINING_JOB_NAME": "pytorch-training-2026-11-22-10-11-12-345",
}  # fmt: skip


def words(sdk: str) -> list[str]:
    """Returns the hyperparameters as the SDK's start command has them."""
    pairs: list[str] = []
    if sdk == "v2":
        for key, value in sorted(HYPERPARAMETERS.items()):
            pairs += [f"--{key}", str(json.loads(json.dumps(value)))]
        return pairs
    for key, value in HYPERPARAMETERS.items():
        pairs += [f"--{key}", value if isinstance(value, str) else json.dumps(value)]
    return pairs


def start_job(sdk: str, code: Path, base: Path, *, real: bool = False) -> subprocess.CompletedProcess[str]:
    """Runs a job's start command in its copy of the source directory, with two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc_per_node=2"]
    if sdk == "v2":
        command += ["--master_addr=127.0.0.1", f"--master_port={free_port()}", "--node_rank=0"]
    else:
        command += [f"--master_port={free_port()}"]  # of a container, where 29500 is free
    variables = SM_VARIABLES | {"SM_MODEL_DIR": str(base / "model"), "SAGEMAKER_BASE_DIR": str(base)}
    variables["OMP_NUM_THREADS"] = "1"
    variables["PYTHONPATH"] = str(code) if sdk == "v2" else ""
    process = (subprocess.Popen if real else Forked)(
        [*command, "recipes/pretrain.py", *words(sdk)], cwd=code, env=environment(**variables), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    output, errors = process.communicate(timeout=300)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


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


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["forked", "real"])
@pytest.mark.parametrize("sdk", ["v2", "v3"])
def test_a_job_trains_the_recipe_that_it_names_and_the_next_job_resumes_it(
    sdk: str, real: bool, tmp_path: Path
) -> None:
    code, base = source_dir(tmp_path, copied=real), tmp_path / "opt/ml"
    (base / "model").mkdir(parents=True)
    done = start_job(sdk, code, base, real=real)
    assert done.returncode == 0, done.stderr
    assert "/pretrain.py, recipe own_configs/tiny.toml\n" in done.stdout
    run = base / "checkpoints/tiny"
    resolved = (run / "recipe.toml").read_text()
    assert "vocab_size = 300\n" in resolved and "steps = 4\n" in resolved and "deterministic = false\n" in resolved
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-00000004"]
    assert list((base / "model/hf").glob("*.safetensors")) and (base / "model/hf/config.json").exists()
    assert not (run / "hf").exists() and not (code / "runs").exists()
    if real:  # the library of the job's source directory: the installed one has a git commit
        assert json.loads((run / "environment.json").read_text())["git_commit"] is None
    again = start_job(sdk, source_dir(tmp_path / "second", copied=real), base, real=real)
    assert again.returncode == 0, again.stderr
    assert "resumed at step 4" in again.stdout


def test_a_program_finds_the_library_beside_it_without_an_install(tmp_path: Path) -> None:
    code = source_dir(tmp_path, copied=True)
    start = code / "titanlike/run/start.py"
    start.write_text(start.read_text().replace("usage: {command}", "usage: of the copy", 1))
    done = subprocess.run(
        [sys.executable, "recipes/pretrain.py", "--help"], cwd=code, env=environment(PYTHONPATH=""), capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.stdout.startswith("usage: of the copy"), done.stderr


def test_keys_take_precedence_over_the_directories_of_a_job(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(f'extends = "{ROOT}/{RECIPE}"\nrun.name = "mine"\n')
    variables = {"SM_MODEL_DIR": "/opt/ml/model"}
    for options, directory, name in (
        ((), "/opt/ml/checkpoints", "mine"),
        (("--run.dir=elsewhere",), "elsewhere", "mine"),
        (("--run.name=other",), "/opt/ml/checkpoints", "other"),
    ):
        job = Forked(
            [sys.executable, str(ROOT / "recipes/pretrain.py"), "--recipe", "own.toml", *options, "--resolved"], cwd=tmp_path,
            env=environment(**variables), stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        output, _ = job.communicate(timeout=60)
        assert f'[run]\nname = "{name}"\ndir = "{directory}"\n' in output


def test_the_directories_of_a_job() -> None:
    assert sagemaker_paths({}) is None
    found = sagemaker_paths({"SM_MODEL_DIR": "/opt/ml/model"})
    assert found and (found.checkpoints, found.model) == ("/opt/ml/checkpoints", "/opt/ml/model")


def test_checkpoints_on_the_disks_of_several_hosts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from titanlike.config import PretrainRecipe, UserError, load
    from titanlike.run.start import _check_sagemaker_checkpoints

    monkeypatch.setenv("SM_MODEL_DIR", "/opt/ml/model")
    monkeypatch.delenv("SAGEMAKER_BASE_DIR", raising=False)
    hosts, one = RankInfo(world_size=4, local_world_size=2), RankInfo(world_size=2, local_world_size=2)
    keys = {"run.dir": "/opt/ml/checkpoints", "checkpoint.dir": ""}
    local = load(PretrainRecipe, ROOT / RECIPE, keys)
    with pytest.raises(UserError, match=r"disk of each host.*set --checkpoint\.dir=s3://BUCKET/PREFIX"):
        _check_sagemaker_checkpoints(local, hosts)
    _check_sagemaker_checkpoints(local, one)
    for changes in ({"checkpoint.dir": "s3://bucket/runs"}, {"checkpoint.enabled": "false"}, {"run.dir": "/fsx"}):
        _check_sagemaker_checkpoints(load(PretrainRecipe, ROOT / RECIPE, keys | changes), hosts)
