"""`titanlike launch`: batch files, manifests and Dockerfiles from a recipe, and what is refused before anything is written."""

import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launching import Cli, environment
from titanlike.distributed.launch_config import LaunchConfig, launch_config
from titanlike.recipe import PretrainRecipe, load
from titanlike.run.start import program_of
from titanlike.tools.clusters import docker

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "train_configs/llama3_8b.toml")


def directives(file: Path) -> set[str]:
    return {line.removeprefix("#SBATCH ") for line in file.read_text().splitlines() if line.startswith("#SBATCH ")}


def test_slurm_batch_file(tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "out"
    options = ["--nodes=4", "--time=1-12", "--grace=120", "--sbatch=--partition=gpu", f"--out={out}", "--dry-run"]
    printed = cli("launch", "slurm", RECIPE, *options, "--training.steps=7000").out
    assert "valid for 32 processes" in printed and "GiB per GPU" in printed and f"sbatch {out}/job.sbatch" in printed
    file = out / "job.sbatch"
    assert directives(file) >= {
        "--nodes=4", "--ntasks-per-node=1", "--gpus-per-node=8", "--time=1-12", "--signal=B:USR1@120", "--requeue",
        "--open-mode=append", "--partition=gpu",
    }  # fmt: skip
    assert f"-m titanlike.run.launch {out}/recipe.toml" in file.read_text()
    assert subprocess.run(["bash", "-n", str(file)], check=False).returncode == 0
    # An option that only HyperPod's srun has.
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "$1"\n')
    srun.chmod(0o755)
    variables = environment(SLURM_JOB_ID="1") | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for cluster, first in (("/nowhere", "--ntasks-per-node=1"), (tmp_path, "--auto-resume=1")):
        script = file.read_text().replace("/opt/sagemaker_cluster", str(cluster))
        assert (
            subprocess.run(["bash", "-c", script], env=variables, capture_output=True, text=True).stdout == f"{first}\n"
        )
    # The recipe of the job: with a name, so that a requeued job resumes, and with time to save.
    recipe = load(PretrainRecipe, out / "recipe.toml")
    assert recipe.run.name.startswith("llama3_8b-") and recipe.run.shutdown_timeout == 90
    assert recipe.training.steps == 7000 and recipe.model == load(PretrainRecipe, Path(RECIPE)).model
    # Each requeue would go back to that step.
    resumed = cli("launch", "slurm", RECIPE, "--out=other", "--dry-run", "--checkpoint.resume_from=800", code=2)
    assert "checkpoint.resume_from = 800: each restart of the job would go back to that step" in resumed.err
    before = file.read_text()
    assert "is not empty; choose another folder" in cli("launch", "slurm", RECIPE, *options, code=2).err
    assert file.read_text() == before


@pytest.mark.parametrize(
    ("options", "provider"),
    [
        (["--nodes=2", "--hardware=ml.p5.48xlarge"], True), (["--hardware=ml.p5.48xlarge"], False), (["--nodes=2"], False),
    ],
)  # fmt: skip
def test_a_slurm_job_of_several_instances_with_efa_requires_it(
    options: list[str], provider: bool, tmp_path: Path, cli: Cli
) -> None:
    cli("launch", "slurm", RECIPE, f"--out={tmp_path}/out", "--dry-run", *options)
    assert ("\nexport FI_PROVIDER=${FI_PROVIDER:-efa}\n" in (tmp_path / "out/job.sbatch").read_text()) == provider


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("slurm", ["--nodes=3"], "training.global_batch_size = 128 does not divide over 24 data-parallel ranks"),
        ("slurm", ["--node=2", "--nodez=3"], "--nodez: unknown option; did you mean --nodes?"),
        ("slurm", ["--time=tomorrow"], "--time tomorrow: give minutes, hours:minutes:seconds or days-hours"),
        ("kubernetes", ["--image=i"], "give --claim, a volume that all pods mount, or --checkpoint.dir=s3://bucket/runs"),
        ("kubernetes", ["--image=i", "--hardware=ml.p5.4xlarge"], "--gpus-per-node 8: ml.p5.4xlarge has 1; give --gpus-per-node 1"),
        # Names that would be something else in a file or on a command line.
        ("kubernetes", ["--image=i", "--claim=a b"], "--claim a b is not a name; use letters"),
        *(
            (target, [f"--image={image}", *claim], f"--image {image} is not a name; use letters, digits and")
            for target, claim in (("kubernetes", ["--claim=a"]), ("docker", []))
            for image in ("", "$(id)")
        ),
        ("skypilot", [], "give --checkpoint.dir=gs://bucket/runs, or --volume PATH=NAME"),
        ("skypilot", ["--file-mount=/a=gs://bucket", "--checkpoint.dir=/a/runs"], "an instance that is replaced loses its"),
        ("skypilot", ["--volume=/a=$B"], "--volume /a=$B: give PATH=SOURCE, with an absolute path and without variables"),
    ],
)  # fmt: skip
def test_a_job_that_cannot_work_is_refused_before_anything_is_written(
    target: str, options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in cli("launch", target, RECIPE, *options, "--dry-run", code=2).err
    assert not list(tmp_path.iterdir())


def manifests(cli: Cli, out: Path, kind: str, *options: str) -> list[dict[str, Any]]:
    arguments = ["--image=registry/titanlike:1", f"--out={out}", f"--kind={kind}", "--dry-run", "--run.name=My_Run.1"]
    cli("launch", "kubernetes", RECIPE, *arguments, *options)
    return list(yaml.safe_load_all((out / f"{kind}.yaml").read_text()))


def test_job_set(tmp_path: Path, cli: Cli) -> None:
    options = ["--nodes=2", "--claim=shared", "--secret=keys", "--grace=100"]
    config, job_set = manifests(cli, tmp_path / "a", "jobset", *options)
    (tmp_path / "recipe.toml").write_text(config["data"]["recipe.toml"])
    recipe = load(PretrainRecipe, tmp_path / "recipe.toml")
    assert recipe.run.name == "My_Run.1" and recipe.run.shutdown_timeout == 70
    assert config["data"]["pretrain.py"] == (ROOT / "recipes/pretrain.py").read_text()
    job = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert variables == {
        "NNODES": "2", "NPROC": "8", "MASTER_PORT": "29500", "NODE_RANK": None, "MASTER_ADDR": "my-run-1-node-0-0.my-run-1",
    }  # fmt: skip
    assert job_set["metadata"]["name"] == job_set["spec"]["network"]["subdomain"] == "my-run-1"
    assert (job["parallelism"], job["completions"], job["completionMode"]) == (2, 2, "Indexed")
    assert pod["terminationGracePeriodSeconds"] == 100 and container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes.keys() == {mount["name"] for mount in container["volumeMounts"]}
    assert volumes["workspace"]["persistentVolumeClaim"] == {"claimName": "shared"}
    assert volumes["shared-memory"]["emptyDir"] == {"medium": "Memory"}


def test_train_job_has_the_same_job_set(tmp_path: Path, cli: Cli) -> None:
    options = ["--nodes=2", "--checkpoint.dir=s3://bucket/runs"]
    _, job_set = manifests(cli, tmp_path / "a", "jobset", *options)
    _, runtime, training = manifests(cli, tmp_path / "b", "trainjob", *options)
    template = runtime["spec"]["template"]["spec"]
    labels = template["replicatedJobs"][0]["template"].pop("metadata")["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert template == job_set["spec"]
    assert training["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"] == "my-run-1"
    assert training["spec"]["trainer"] == {"numNodes": 2, "image": "registry/titanlike:1"}


def test_hyperpod_job(tmp_path: Path, cli: Cli) -> None:
    options = ["--nodes=2", "--claim=shared", "--grace=100", "--hardware=ml.p5.48xlarge"]
    config, job = manifests(cli, tmp_path / "a", "hyperpod", *options)
    assert config["metadata"]["name"] == job["metadata"]["name"] == "my-run-1"
    (node,) = job["spec"]["replicaSpecs"]
    pod = node["template"]["spec"]
    (container,) = pod["containers"]
    assert (job["spec"]["nprocPerNode"], node["replicas"]) == ("8", 2)
    assert container["command"][:4] == ["hyperpodrun", "--nnodes=2", "--nproc-per-node=8", "--shutdown-timeout=70"]
    assert pod["nodeSelector"] == {"node.kubernetes.io/instance-type": "ml.p5.48xlarge"}
    # The operator gives each pod its rank.
    assert container["env"] == [{"name": "FI_PROVIDER", "value": "efa"}] and "initContainers" not in pod
    assert {volume["name"] for volume in pod["volumes"]} == {mount["name"] for mount in container["volumeMounts"]}
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8, "vpc.amazonaws.com/efa": 32}
    # Half of a node has half of its interfaces, a single node has none.
    for others, efa in ((["--gpus-per-node=4"], 16), (["--nodes=1"], None)):
        _, job = manifests(cli, tmp_path / str(others), "hyperpod", *options, *others)
        (container,) = job["spec"]["replicaSpecs"][0]["template"]["spec"]["containers"]
        assert container["resources"]["limits"].get("vpc.amazonaws.com/efa") == efa


def sky_task(monkeypatch: pytest.MonkeyPatch, cli: Cli, out: Path, *options: str) -> dict[str, Any]:
    def build_wheel(folder: Path) -> str:
        (folder / "titanlike-1-py3-none-any.whl").touch()
        return "titanlike-1-py3-none-any.whl"

    monkeypatch.setattr(docker, "build_wheel", build_wheel)
    printed = cli("launch", "skypilot", RECIPE, f"--out={out}", "--dry-run", *options).out
    text = (out / "task.yaml").read_text()
    task = yaml.safe_load(text)
    assert isinstance(task, dict) and "\nrun: |\n" in text
    return task | {"printed": printed}


def test_sky_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    out = tmp_path / "my jobs: #1 $(touch x)"
    options = ["--run.name=My_Run.1", "--checkpoint.dir=gs://bucket/runs", "--data.path=s3://corpus/*.bin"]
    mounts = ["--file-mount=/data=s3://corpus/a", "--volume=/shared=disk", "--secret=HF_TOKEN", "--disk-size=500"]
    task = sky_task(monkeypatch, cli, out, "--nodes=2", "--infra=gcp/us-central1", "--spot", *options, *mounts)
    assert (task["name"], task["num_nodes"], task["workdir"]) == ("my-run-1", 2, str(out))
    assert task["resources"] == {
        "infra": "gcp/us-central1", "accelerators": "H100:8", "disk_size": 500, "use_spot": True,
        "job_recovery": {"max_restarts_on_errors": 1, "recover_on_exit_codes": [130, 138, 143]},
    }  # fmt: skip
    assert task["secrets"] == {"HF_TOKEN": None} and task["volumes"] == {"/shared": "disk"}
    assert task["file_mounts"] == {"/data": "s3://corpus/a"}
    assert "'./titanlike-1-py3-none-any.whl[data,gcs,s3]'" in task["setup"]
    assert subprocess.run(["bash", "-n", "-c", task["setup"]], check=False).returncode == 0
    # All that the task uses is in its folder, and git's rules leave nothing out.
    assert {path.name for path in out.iterdir()} == {
        "recipe.toml", "pretrain.py", "task.yaml", "titanlike-1-py3-none-any.whl", ".skyignore",
    }  # fmt: skip
    assert load(PretrainRecipe, out / "recipe.toml").run.name == "My_Run.1"
    command = shlex.split(task["printed"].splitlines()[-1].removeprefix("to submit: "))
    assert command == ["sky", "jobs", "launch", "--secret", "HF_TOKEN", f"{out}/task.yaml"]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_run_block_of_a_sky_task_starts_the_launcher_of_each_node(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """The address of node 0 and the number of processes are what the launcher reads, and its exit code is that of the block."""
    options = [
        "--nodes=2",
        "--gpus-per-node=4",
        f"--run.device={device}",
        "--volume=/shared=disk",
        "--checkpoint.dir=/shared/a",
    ]
    task = sky_task(monkeypatch, cli, tmp_path / "out", *options)
    assert ("accelerators" in task["resources"]) == (device == "cuda")
    python = tmp_path / "titanlike-env/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@"\nenv\nexit 143\n')
    python.chmod(0o755)
    for rank in range(2):
        sky = {"NODE_RANK": str(rank), "NUM_NODES": "2", "NODE_IPS": "10.0.0.5\n10.0.0.7", "NUM_GPUS_PER_NODE": "4"}
        variables = {f"SKYPILOT_{name}": value for name, value in sky.items()} | task["envs"]
        if device == "cpu":
            variables["SKYPILOT_NUM_GPUS_PER_NODE"] = "0"
        done = subprocess.run(
            ["bash", "-c", task["run"]], env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), **variables},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (143, "")
        arguments, *environ = done.stdout.splitlines()
        assert arguments == "-m titanlike.run.launch recipe.toml --run.dir=/tmp/titanlike/runs"
        config = launch_config(dict(line.split("=", 1) for line in environ if "=" in line))
        assert config == LaunchConfig(2, rank, 4, "10.0.0.5", 29500, 3)


@pytest.mark.slow  # builds the wheel
def test_docker_folder_has_all_that_the_image_needs(tmp_path: Path, cli: Cli) -> None:
    out, installed = tmp_path / "out", tmp_path / "installed"
    recipe = str(ROOT / "train_configs/debug.toml")
    options = ["--gpus-per-node=1", "--image=mine:1", f"--out={out}", "--dry-run", "--run.device=cpu"]
    cli("launch", "docker", recipe, *options)
    lines = [line.split() for line in (out / "Dockerfile").read_text().splitlines() if line and line[0] not in "# "]
    copied = {name for words in lines if words[0] == "COPY" for name in words[1:-1]}
    assert copied == {path.name for path in out.iterdir()} - {"Dockerfile"}
    assert ["USER", "titanlike"] in lines and ["ARG", "TORCH_INDEX=https://download.pytorch.org/whl/cpu"] in lines
    assert ["ARG", 'TORCH_VERSION=">=2.11,<2.16"'] in lines
    # The wheel, the recipe and the program are enough to start, without the repository.
    (wheel,) = out.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(installed)
    command = [sys.executable, "-m", "titanlike.run.launch", str(out / "recipe.toml"), "--check=1"]
    variables = environment(PYTHONPATH=str(installed))
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "valid for 1 process" in done.stdout, done.stderr


@pytest.mark.slow  # imports some hundred generated models
@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_manifests_are_valid_in_the_schemas_of_kubernetes(kind: str, tmp_path: Path, cli: Cli) -> None:
    from kubeflow_trainer_api import models
    from kubeflow_trainer_api.models.io_k8s_api_core_v1_config_map import IoK8sApiCoreV1ConfigMap

    types = {
        "ConfigMap": IoK8sApiCoreV1ConfigMap,
        "JobSet": models.JobsetV1alpha2JobSet,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
        "TrainJob": models.TrainerV1alpha1TrainJob,
    }
    options = ["--nodes=2", "--claim=shared", "--secret=keys"]
    for manifest in manifests(cli, tmp_path / "a", kind, *options):
        parsed = types[manifest["kind"]].from_dict(manifest)
        assert parsed.to_dict() == manifest  # an unknown field would be lost


def test_a_program_whose_name_would_be_another_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "recipes/pretrain.py", tmp_path / "a\nRUN id #.py")
    Path("recipe.toml").write_text(f'extends = "{RECIPE}"\nprogram = "a\\nRUN id #.py"\n')
    for target, options in (("docker", []), ("kubernetes", ["--image=i", "--claim=a"])):
        message = r"program = 'a\nRUN id #.py': name the program with letters, digits and . _ - only"
        assert message in cli("launch", target, "recipe.toml", *options, "--dry-run", "--out=out", code=2).err
    assert not Path("out").exists()


def test_the_recipe_of_a_slurm_job_finds_a_program_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """It is in another directory than the recipe that names the program by a relative path."""
    monkeypatch.chdir(tmp_path)
    Path("custom").mkdir()
    shutil.copy(ROOT / "recipes/pretrain.py", "custom/train.py")
    Path("custom/train.toml").write_text(f'extends = "{RECIPE}"\nprogram = "train"\n')
    for out, words in (("named", ["custom/train.toml"]), ("overridden", [RECIPE, "--program=custom/train.py"])):
        cli("launch", "slurm", *words, "--nodes=2", f"--out={out}", "--dry-run")
        assert program_of(Path(out, "recipe.toml")) == tmp_path / "custom/train.py"
