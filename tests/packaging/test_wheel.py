"""The wheel, installed into a new environment and used in an empty folder: what the pages and messages say to type there works."""

import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import tomli

import titanlike
from tests.launching import ROOT, environment, losses
from tests.programs import INSTALLED, blocks, edited
from titanlike.config.shipped import shipped_recipes
from titanlike.tools.clusters.docker import SOURCES

SHORT = "--training.steps=3 --schedule.warmup_steps=1 --metrics.interval=1 --validation.interval=0 --sample.tokens=0"
LOSS = "            loss = forward_backward("


def shell(line: str, folder: Path, programs: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a line as it is typed, with the programs of an environment first on the path, and without PYTHONPATH."""
    given = environment(PATH=f"{programs}:/usr/bin:/bin", **variables)
    given.pop("PYTHONPATH", None)
    return subprocess.run(["bash", "-c", line], cwd=folder, env=given, capture_output=True, text=True, check=False)


def wheel_of_a_copy(folder: Path) -> Path:
    """Builds the wheel in a copy of the clone, because setuptools writes into the source."""
    for name in SOURCES:
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, folder / name)
    built = shell(INSTALLED[0], folder, Path(sys.executable).parent)
    assert built.returncode == 0, built.stderr
    (wheel,) = (folder / "dist").iterdir()
    return wheel


def check_files(wheel: Path) -> None:
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert {name.split("/")[0] for name in names} == {"titanlike"}
    for folder in ("recipes", "train_configs"):
        files = {
            str(path.relative_to(ROOT)) for suffix in ("py", "toml") for path in (ROOT / folder).rglob(f"*.{suffix}")
        }
        packed = {name.removeprefix("titanlike/") for name in names if name.startswith(f"titanlike/{folder}/")}
        assert packed == files
    suffixes = (".toml", ".css", ".html", ".js", ".c", ".h")
    data = [path for path in (ROOT / "titanlike").rglob("*") if path.suffix in suffixes]
    data.append(ROOT / "titanlike/tools/null_gpu/process/sitecustomize.py")  # in no package
    assert {str(path.relative_to(ROOT)) for path in data} <= set(names)


def test_all_packages_are_in_the_wheel() -> None:
    """A setup.py could find them, but SageMaker's toolkit does not run torchrun in a source directory with one."""
    listed = tomli.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {".".join(path.relative_to(ROOT).parent.parts) for path in (ROOT / "titanlike").rglob("__init__.py")}
    assert sorted(listed) == sorted([*found, "titanlike.recipes", "titanlike.train_configs"])
    assert not (ROOT / "setup.py").exists()


def test_the_requirements_of_a_job_are_those_of_the_package() -> None:
    """A job's source directory can be read-only, so pip cannot build the package in it. The image has torch."""
    project = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    expected = {*project["dependencies"], *extras["data"], *extras["s3"]}
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
    assert sorted(lines) == sorted(line for line in expected if not re.match("torch[<>=]", line))


@pytest.mark.slow
@pytest.mark.minutes
def test_the_wheel_trains_in_an_empty_folder(tmp_path: Path) -> None:
    work, clone = tmp_path / "work", tmp_path / "clone"
    work.mkdir()
    clone.mkdir()
    wheel = wheel_of_a_copy(clone)
    check_files(wheel)

    # What is installed here, without this clone, which an editable install would add.
    venv.create(tmp_path / "venv", with_pip=True)
    (packages,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    folders = [path for path in sys.path if path and not Path(path).is_relative_to(ROOT)]
    (packages / "base.pth").write_text("\n".join(folders) + "\n")

    def run(line: str, code: int = 0, **variables: str) -> str:
        done = shell(line, work, tmp_path / "venv/bin", **variables)
        assert done.returncode == code, done.stderr
        return done.stderr if code else done.stdout

    shutil.copy(wheel, work)
    output = run(f"{INSTALLED[1].strip()} {SHORT} --run.name=shipped")
    program, recipe = f"{packages}/titanlike/recipes/pretrain.py", f"{packages}/titanlike/train_configs/debug.toml"
    assert f"program {program}, recipe {recipe}\n" in output
    assert run("titanlike --version") == f"titanlike {titanlike.__version__}\n"
    assert run("titanlike recipes").count("\n") == len(shipped_recipes()) > 30
    assert run("titanlike train debgu", 2) == "error: debgu: recipe not found; did you mean debug?\n"

    # A copy, a changed line, and a run under tensor parallelism that shows it.
    (block,) = [block for block in blocks(ROOT / "docs/quickstart.md") if "custom/train.toml" in block]
    copying, training = block.splitlines()
    assert run(copying).endswith(f"next  {training}\n")
    assert "custom/train.toml exists" in run(copying, 2)
    copied = work / "custom/train.py"
    changed = f"            sys.stdout.write(f'changed {{step}}\\n')\n{LOSS}"
    copied.write_text(edited(copied.read_text(), (LOSS, changed)))
    words = f"{training} {SHORT} --parallelism.tensor=2 --run.name=copy"
    copy = run(words, NPROC="2")
    assert "program custom/train.py, recipe custom/train.toml\n" in copy and "changed 3\n" in copy
    assert losses(work / "runs/copy") == pytest.approx(losses(work / "runs/shipped"), rel=1e-3)

    # The commands that a run and `titanlike init` print at their end.
    following = re.findall(r"^(?:next)? {4,}(titanlike .*)", output, flags=re.MULTILINE)
    assert [line.split()[1] for line in following] == ["generate", "export", "compare"]
    for line in following:
        run(line.replace("TEXT", "TEXT --tokens=2").replace("OTHER_RUN", "runs/copy"))
    first, second = re.findall(r"titanlike train .*", run("titanlike init"))
    assert run(first) == "train.toml: valid for 1 process (data files not checked)\n" and second in first
    missing = [line for line in run("titanlike doctor").splitlines() if line.startswith("missing")]
    assert all(line.endswith("(optional)") for line in missing)

    # A job of each kind by the same command, and a sweep whose trials are jobs of SageMaker.
    for words, file, content in (
        ("slurm", "job.sbatch", "#SBATCH --nodes=2"),
        ("kubernetes --image registry/titanlike:1 --claim training", "jobset.yaml", "kind: JobSet"),
    ):
        run(f"titanlike launch {words} debug --nodes 2 --gpus-per-node 1 --out launch --dry-run")
        assert content in (work / "launch" / file).read_text()
        shutil.rmtree(work / "launch")
    job = run("titanlike launch sagemaker debug --nodes 2 --training.global_batch_size=16 --dry-run")
    assert '"InstanceCount": 2' in job and "titanlike/recipes/pretrain.py" in run(
        'python -c "from titanlike.tools.clusters.sagemaker.bundle import LIBRARY; print(LIBRARY)"'
    ).replace("*", "pretrain")
    (work / "sweep.toml").write_text('recipe = "debug"\n[search."optimizer.lr"]\nvalues = [1e-2, 2e-2]\n')
    run("titanlike sweep sweep.toml --dry-run")
    assert '"InstanceCount": 1' in run("titanlike sweep sweep.toml --resources.backend=sagemaker --dry-run")
    assert {path.name for path in work.iterdir()} == {
        "FOLDER",
        "custom",
        "runs",
        "sweep.toml",
        "train.toml",
        wheel.name,
    }
    assert {path.name for path in (work / "runs").iterdir()} == {"shipped", "copy"}
