"""A copy of the program and a recipe, with a section and a line of its own, as described in docs/copy.md."""

from pathlib import Path

from tests.launching import ROOT, SMALL, losses, python, run

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


def edited(text: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert text.count(old) == 1, f"the program does not have exactly one {old!r}"
        text = text.replace(old, new)
    return text


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
    assert "--noise.scale" in run(tmp_path, "loud.toml", "--help").stdout
    resolved = (tmp_path / "runs/loud/recipe.toml").read_text()
    assert "[noise]\nscale = 0.01" in resolved
    # The resolved recipe refers to the copied program, which can also be started directly.
    assert "resumed at step 6" in run(tmp_path, "runs/loud/recipe.toml").stdout
    assert "resumed at step 6" in python(tmp_path, "noisy.py", "runs/loud/recipe.toml").stdout
