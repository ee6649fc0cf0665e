"""A copy of the program and a recipe, with a section and a line of its own, as described in docs/copy.md."""

import shlex
from pathlib import Path

import pytest

from tests.launching import ROOT, SMALL, losses, python, run
from tests.programs import blocks, edited

SECTION = '''
from titanlike.config import section


@section
class Noise:
    """Gradient noise."""

    scale: float = 0.0
    """Standard deviation."""


@section
class NoisyRecipe(PretrainRecipe):
    """The recipe of this program."""

    noise: Noise = Noise()

'''


def test_a_copied_program_with_a_section_and_a_line_of_its_own(tmp_path: Path) -> None:
    program = edited(
        (ROOT / "recipes/pretrain.py").read_text(),
        ("from titanlike.run.start import start\n", "from titanlike.run.start import start\n" + SECTION),
        ("    recipe = start(PretrainRecipe)", "    recipe = start(NoisyRecipe)"),
        ("def main(recipe: PretrainRecipe,", "def main(recipe: NoisyRecipe,"),
        (
            "            norms = gradient_norms(model, mesh.pipeline)",
            "            for parameter in model.parameters():\n"
            "                parameter.grad.add_(recipe.noise.scale)\n"
            "            norms = gradient_norms(model, mesh.pipeline)",
        ),
    )
    (tmp_path / "noisy.py").write_text(program)
    debug = (ROOT / "train_configs/debug.toml").read_text()
    (tmp_path / "quiet.toml").write_text(edited(debug, ('recipe = "pretrain"', 'recipe = "noisy"')))
    (tmp_path / "loud.toml").write_text('extends = "quiet.toml"\n[noise]\nscale = 0.01\n')

    for name in ("quiet", "loud"):
        done = run(tmp_path, f"{name}.toml", **SMALL | {"run.name": name})
        assert done.returncode == 0, done.stderr
    shipped = run(tmp_path, **SMALL | {"run.name": "shipped"})
    assert shipped.returncode == 0
    assert losses(tmp_path / "runs/quiet") == losses(tmp_path / "runs/shipped")
    assert losses(tmp_path / "runs/loud") != losses(tmp_path / "runs/shipped")

    # The section and the program are part of the run's identity: a resume with another one is refused.
    for other in (("loud.toml", "--noise.scale=0.5"), ("quiet.toml", "--recipe=pretrain")):
        refused = run(tmp_path, *other, **SMALL | {"run.name": "loud"})
        assert refused.returncode == 2
    assert "noise.scale" in run(tmp_path, "loud.toml", "--noise.scale=0.5", **SMALL | {"run.name": "loud"}).stderr

    wrong = run(tmp_path, "loud.toml", "--noise.scalle=1")
    assert "noise.scalle = 1: unknown key; did you mean noise.scale?" in wrong.stderr
    assert "noise                    1 key   Gradient noise." in run(tmp_path, "loud.toml", "--help").stdout
    assert "--noise.scale" in run(tmp_path, "loud.toml", "--help", "noise").stdout
    resolved = (tmp_path / "runs/loud/recipe.toml").read_text()
    assert "[noise]\nscale = 0.01" in resolved
    # The resolved recipe refers to the copied program, which can also be started directly.
    assert "resumed at step 6" in run(tmp_path, "runs/loud/recipe.toml").stdout
    assert "resumed at step 6" in python(tmp_path, "noisy.py", "runs/loud/recipe.toml").stdout


def test_the_copy_block_of_the_readme_runs_the_changed_program(tmp_path: Path) -> None:
    (block,) = [block for block in blocks(ROOT / "docs/commands.md") if "custom/train.toml" in block]
    *copying, running = block.splitlines()
    for line in copying:
        copied = python(tmp_path, "-m", "titanlike.tools.cli.main", *shlex.split(line)[1:])
        assert copied.returncode == 0 and copied.stdout.endswith(f"next  {running}\n"), copied.stderr
    program = tmp_path / "custom/train.py"
    loss = "forward_backward(model, microbatches, num_tokens, mesh,"
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


def test_a_program_that_is_started_directly_is_the_one_of_its_recipe(tmp_path: Path) -> None:
    shipped = str(ROOT / "recipes/pretrain.py")
    (tmp_path / "mine.toml").write_text(f'extends = "{ROOT}/train_configs/debug.toml"\nrun.name = "mine"\n')
    (tmp_path / "mine.py").write_text((ROOT / "recipes/pretrain.py").read_text())
    small = [f"--{key}={value}" for key, value in SMALL.items()]
    for words, message in (
        (
            ("mine.py", "mine.toml"),
            f'mine.py is running, but the program of mine.toml is {shipped}; set recipe = "mine"',
        ),
        (
            (shipped, "mine.toml", "--recipe=mine"),
            f"{shipped} is running, but the program of mine.toml is mine.py; set",
        ),
        ((shipped, "--recipe", "nonsense"), "command line: recipe = 'nonsense': there is no program 'nonsense.py' in "),
        ((shipped, "--recipe", "none.toml"), "none.toml: recipe not found"),
        ((shipped, "mine.toml", "--recipe", "mine.toml"), "mine.toml mine.toml: give one recipe"),
    ):
        refused = python(tmp_path, *words, *small)
        assert refused.returncode == 2, words
        assert refused.stderr.startswith(f"error: {message}")
        assert not (tmp_path / "runs").exists()
    # The recipe of a key, as SageMaker passes it; the program beside the recipe is not the one that it names.
    done = python(tmp_path, shipped, "--recipe", "mine.toml", *small)
    assert done.returncode == 0, done.stderr
    assert f"program {shipped}, recipe mine.toml\n" in done.stdout
    assert f'warning: mine.py is not used: the program of mine.toml is {shipped}; to use it, set recipe = "mine"' in (
        done.stderr
    )
    assert losses(tmp_path / "runs/mine")
    # Without a recipe, any program trains the default one.
    assert python(tmp_path, "mine.py", *small, "--run.name=default").returncode == 0
    # With the remedy, the program runs without a warning.
    done = python(tmp_path, "mine.py", "mine.toml", "--recipe=mine", *small, "--run.name=own")
    assert done.returncode == 0
    assert not done.stderr
