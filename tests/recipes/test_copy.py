"""Copies of the program and of a recipe, and which program is started. test_extending.py runs the changes of docs/extending.md."""

import shlex
from pathlib import Path

import pytest

from tests.launching import ROOT, SMALL, losses, python, run
from tests.programs import blocks, edited


def test_the_copy_block_of_the_readme_runs_the_changed_program(tmp_path: Path) -> None:
    (block,) = [block for block in blocks(ROOT / "docs/quickstart.md") if "custom/train.toml" in block]
    *copying, running = block.splitlines()
    for line in copying:
        copied = python(tmp_path, "-m", "titanlike.tools.cli.main", *shlex.split(line)[1:])
        assert copied.returncode == 0 and copied.stdout.endswith(f"next  {running}\n"), copied.stderr
    program = tmp_path / "custom/train.py"
    loss = "model, microbatches, num_tokens, mesh,"
    program.write_text(edited(program.read_text(), (loss, loss.replace("num_tokens", "num_tokens / 2"))))
    *program_words, recipe = running.split()
    assert program_words == ["titanlike", "train"]
    done = run(tmp_path, recipe, **SMALL | {"run.name": "changed"})
    assert done.returncode == 0, done.stderr
    assert "program custom/train.py, recipe custom/train.toml\n" in done.stdout
    assert "warning" not in done.stderr
    shipped = run(tmp_path, **SMALL | {"run.name": "shipped"})
    assert f"program {ROOT}/recipes/pretrain.py, recipe {ROOT}/train_configs/debug.toml\n" in shipped.stdout
    assert losses(tmp_path / "runs/changed")[1] == pytest.approx(2 * losses(tmp_path / "runs/shipped")[1], rel=1e-6)


def test_a_loop_that_a_copy_leaves_early_ends_as_a_complete_run_does(tmp_path: Path) -> None:
    save = "                run.save(model, optimizer)\n"
    program = (ROOT / "recipes/pretrain.py").read_text()
    (tmp_path / "mine.py").write_text(edited(program, (save, f"{save}                break\n")))
    (tmp_path / "mine.toml").write_text(f'extends = "{ROOT}/train_configs/debug.toml"\nprogram = "mine"\n')
    options = {"run.name": "run", "checkpoint.interval": "2", "checkpoint.export": "float32"}
    done = run(tmp_path, "mine.toml", **SMALL | options)
    assert done.returncode == 0 and "done: runs/run\n" in done.stdout, done.stderr
    assert list(losses(tmp_path / "runs/run")) == [1, 2]
    assert (tmp_path / "runs/run/checkpoints/step-00000002/manifest.json").exists()
    assert (tmp_path / "runs/run/hf/config.json").exists()


def test_a_program_that_is_started_directly_is_the_one_of_its_recipe(tmp_path: Path) -> None:
    shipped = str(ROOT / "recipes/pretrain.py")
    (tmp_path / "mine.toml").write_text(f'extends = "{ROOT}/train_configs/debug.toml"\nrun.name = "mine"\n')
    (tmp_path / "mine.py").write_text((ROOT / "recipes/pretrain.py").read_text())
    small = [f"--{key}={value}" for key, value in SMALL.items()]
    for words, message in (
        (
            ("mine.py", "mine.toml"),
            f'mine.py is running, but the program of mine.toml is {shipped}; set program = "mine"',
        ),
        (
            (shipped, "--program", "nonsense"),
            "command line: program = 'nonsense': there is no program 'nonsense.py' in ",
        ),
        ((shipped, "mine.toml", "--recipe", "mine.toml"), "mine.toml mine.toml: give one recipe"),
    ):
        refused = python(tmp_path, *words, *small)
        assert refused.returncode == 2, words
        assert refused.stderr.startswith(f"error: {message}")
        assert not (tmp_path / "runs").exists()
    # The recipe of a key, as SageMaker passes it; the program beside the recipe is not the one that it names.
    done = python(tmp_path, shipped, "--recipe", "mine.toml", *small, "--training.master_dtype=bfloat16")
    assert done.returncode == 0, done.stderr
    assert "warning: training.master_dtype = 'bfloat16' without optimizer.stochastic_rounding: steps of " in done.stderr
    assert f"program {shipped}, recipe mine.toml\n" in done.stdout
    assert f'warning: mine.py is not used: the program of mine.toml is {shipped}; to use it, set program = "mine"' in (
        done.stderr
    )
    assert losses(tmp_path / "runs/mine")
