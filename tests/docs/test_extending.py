"""The examples of docs/extending.md as they are written, under several processes."""

import dataclasses
import importlib.util
import sys
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

from tests.launching import ROOT
from tests.plain_loop import plain_loop
from tests.pool import Ranks
from tests.programs import blocks, edited
from tests.training import mesh_of, result, tiny
from titanlike.config.sections import Parallelism
from titanlike.recipe import PretrainRecipe

SECTION, NOISE, LOSS, _, _, LAYER = blocks(ROOT / "docs/extending.md", "python")


def write_program(folder: Path, layer: str = "") -> Path:
    """Writes a copy of the shipped program with the changes of the page."""
    start, norms = (
        "from titanlike.run.start import start\n",
        "            norms = gradient_norms(model, mesh.pipeline)\n",
    )
    program = edited(
        (ROOT / "recipes/pretrain.py").read_text(),
        (start, start + SECTION),
        ("recipe = start(PretrainRecipe)", "recipe = start(NoisyRecipe)"),
        ("def main(recipe: PretrainRecipe)", LOSS + "\n\ndef main(recipe: NoisyRecipe)"),
        ("compile=recipe.compile,\n", "compile=recipe.compile,\n            loss=smoothed_cross_entropy,\n"),
        (built := "            model = build_model(recipe.model)\n", built + indent(layer, " " * 8)),
        (norms, indent(NOISE, " " * 12) + norms),
    )
    file = folder / "noisy.py"
    file.write_text(program)
    return file


def imported(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train_copy(file: Path, recipe: PretrainRecipe, scale: float, frozen: str = "") -> None:
    """Runs the copied program on this rank of a pool, with a module of the model frozen."""
    module = imported(file)
    build_model = module.build_model

    def build(*arguments: Any) -> Any:
        model = build_model(*arguments)
        model.get_submodule(frozen).requires_grad_(not frozen)
        return model

    module.build_model = build
    module.build_mesh = mesh_of
    values = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}
    module.main(module.NoisyRecipe(**values, noise=module.Noise(scale)))


def test_the_changed_program_under_two_processes(ranks: Ranks, tmp_path: Path) -> None:
    file = write_program(tmp_path)
    losses = []
    for scale in (0.0, 0.05):
        recipe = tiny(
            tmp_path,
            f"scale-{scale}",
            parallelism=Parallelism(tensor=2, shard=1),
            training=dict(steps=3, local_batch_size=2),
        )
        ranks(2).run(train_copy, file, recipe, scale)
        losses.append(result(recipe).losses)
    assert losses[0] == pytest.approx(plain_loop(recipe, label_smoothing=0.1)[0], rel=1e-5)
    assert losses[1][0] == losses[0][0] and losses[1][1] != losses[0][1]


def test_the_changed_program_with_parameters_that_have_no_gradient(ranks: Ranks, tmp_path: Path) -> None:
    """And with another layer, of which gradients flow through."""
    file = write_program(tmp_path, LAYER)
    losses = []
    for scale in (0.0, 0.05):
        recipe = tiny(
            tmp_path, f"scale-{scale}", parallelism=Parallelism(shard=1), training=dict(steps=3, local_batch_size=2)
        )
        ranks(1).run(train_copy, file, recipe, scale, "layers.0")
        losses.append(result(recipe).losses)
    assert losses[1][0] == losses[0][0] and losses[1][1] != losses[0][1]
