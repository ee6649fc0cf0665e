"""The wheel, installed into a new environment and used in an empty folder: it trains, lists its recipes and copies one."""

import shlex
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import titanlike
from tests.launching import ROOT, environment, losses
from tests.programs import edited
from titanlike.config.shipped import shipped_recipes
from titanlike.tools.clusters.docker import build_wheel

SHORT = "--training.steps=3 --schedule.warmup_steps=1 --metrics.interval=1 --validation.interval=0 --sample.tokens=0"
LOSS = "            loss, local_loss = forward_backward("


@pytest.mark.slow
def test_the_wheel_trains_in_an_empty_folder(tmp_path: Path) -> None:
    wheel = tmp_path / build_wheel(tmp_path)
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert {name.split("/")[0] for name in names} == {"titanlike"}
    for folder in ("recipes", "train_configs"):
        files = {
            str(path.relative_to(ROOT)) for suffix in ("py", "toml") for path in (ROOT / folder).rglob(f"*.{suffix}")
        }
        packed = {name.removeprefix("titanlike/") for name in names if name.startswith(f"titanlike/{folder}/")}
        assert packed == files
    data = [path for path in (ROOT / "titanlike").rglob("*") if path.suffix in (".toml", ".css", ".html", ".js")]
    assert data and {str(path.relative_to(ROOT)) for path in data} <= set(names)

    # What is installed here, without this clone, which an editable install would add.
    venv.create(tmp_path / "venv", with_pip=True)
    (packages,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    folders = [path for path in sys.path if path and not Path(path).is_relative_to(ROOT)]
    (packages / "base.pth").write_text("\n".join(folders) + "\n")
    programs = tmp_path / "venv/bin"
    subprocess.run([programs / "pip", "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)
    work = tmp_path / "work"
    work.mkdir()

    def installed(line: str, **variables: str) -> subprocess.CompletedProcess[str]:
        # Without PYTHONPATH, and with the new environment first on the path.
        given = environment(PATH=f"{programs}:/usr/bin:/bin", **variables)
        given.pop("PYTHONPATH", None)
        command = [programs / "titanlike", *shlex.split(line)]
        return subprocess.run(command, cwd=work, env=given, capture_output=True, text=True, check=False)

    listed = installed("recipes")
    assert listed.stdout.count("\n") == len(shipped_recipes()) > 30, listed.stderr
    assert installed("--version").stdout == f"titanlike {titanlike.__version__}\n"
    refused = installed("train debgu")
    assert (refused.returncode, refused.stderr) == (2, "error: debgu: recipe not found; did you mean debug?\n")
    done = installed(f"train {SHORT} --run.name=shipped")
    assert done.returncode == 0, done.stderr
    assert (
        f"program {packages}/titanlike/recipes/pretrain.py, recipe {packages}/titanlike/train_configs/debug.toml\n"
        in (done.stdout)
    )
    copied = installed("recipes copy debug my/")
    assert copied.stdout.endswith("next  titanlike train my/debug.toml\n"), copied.stderr
    assert installed("recipes copy debug my/").returncode == 2
    program = work / "my/debug.py"
    program.write_text(
        edited(program.read_text(), (LOSS, f"            sys.stdout.write(f'changed {{step}}\\n')\n{LOSS}"))
    )
    done = installed(f"train my/debug.toml {SHORT} --parallelism.tensor=2 --run.name=copy", NPROC="2")
    assert done.returncode == 0, done.stderr
    assert "program my/debug.py, recipe my/debug.toml\n" in done.stdout and "changed 3\n" in done.stdout
    assert losses(work / "runs/copy") == pytest.approx(losses(work / "runs/shipped"), rel=1e-3)
    assert {path.name for path in work.iterdir()} == {"my", "runs"}
