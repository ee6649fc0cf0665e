"""Muon in one process, parameter groups of a recipe, and what is refused."""

from pathlib import Path

import pytest
import torch
from torch import nn

from titanlike.config.optimizer import Optimizer, OptimizerGroup
from titanlike.models.llama.config import LlamaConfig
from titanlike.models.registry import build_model
from titanlike.optim.muon import Muon, orthogonalize
from titanlike.optim.optimizer import build_optimizer
from titanlike.optim.schedule import set_learning_rate
from titanlike.recipe import PretrainRecipe, load, to_toml

MODEL = LlamaConfig(dim=32, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=48, vocab_size=320)
MUON = OptimizerGroup(pattern="layers", optimizer="muon")


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="added in torch 2.9")
@pytest.mark.parametrize(("scaling", "name"), [("rms", "match_rms_adamw"), ("spectral", "original")])
def test_updates_are_those_of_torch(scaling: str, name: str) -> None:
    torch.manual_seed(0)
    shapes = [(24, 40), (40, 24), (16, 16), (8, 40)]
    found, expected = ([nn.Parameter(torch.full(shape, 0.5)) for shape in shapes] for _ in range(2))
    optimizer = Muon(found, lr=0.02, weight_decay=0.1, lr_scaling=scaling, dtype=torch.bfloat16)  # type: ignore[arg-type]
    reference = torch.optim.Muon(expected, lr=0.02, weight_decay=0.1, adjust_lr_fn=name)
    for _ in range(3):
        for one, other in zip(found, expected, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        optimizer.step()
        reference.step()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_a_stack_is_updated_as_its_matrices() -> None:
    stack = nn.Parameter(torch.zeros(2, 8, 12))
    matrices = [nn.Parameter(torch.zeros(8, 12)) for _ in stack]
    optimizer = Muon([stack, *matrices], lr=0.1, num_steps=2)
    stack.grad = torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(0))
    for matrix, gradient in zip(matrices, stack.grad, strict=True):
        matrix.grad = gradient.clone()
    optimizer.step()
    torch.testing.assert_close(stack.data, torch.stack([matrix.data for matrix in matrices]))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_of_all_optimizers_are_reset(set_to_none: bool) -> None:
    model = build_model(MODEL)
    optimizer = build_optimizer(model, Optimizer(groups=(MUON,)))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.zero_grad(set_to_none)
    for parameter in model.parameters():
        assert parameter.grad is None if set_to_none else parameter.grad is not None and not parameter.grad.any()


def test_orthogonalized_matrices_have_singular_values_near_one() -> None:
    torch.manual_seed(0)
    for shape in ((32, 64), (64, 32)):
        values = torch.linalg.svdvals(orthogonalize(torch.randn(shape)))
        assert values.min() > 0.5 and values.max() < 1.5
    assert not orthogonalize(torch.zeros(4, 8)).any()


@pytest.mark.parametrize("shape", [(8, 40), (40, 8), (3, 40, 8), (3, 8, 40)])
def test_steps_of_the_gram_matrix_are_those_of_the_matrix(shape: tuple[int, ...]) -> None:
    """With singular values over six orders of magnitude, and with zeros."""
    torch.manual_seed(0)
    u, _, vh = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    for values in (torch.logspace(0, -6, 8), torch.tensor([1.0] * 4 + [0.0] * 4)):
        matrix = u * values @ vh
        expected = orthogonalize(matrix.double())
        assert (orthogonalize(matrix).double() - expected).abs().max() < 1e-3


def names_of(model: nn.Module, parameters: list[torch.Tensor]) -> set[str]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)] for parameter in parameters}


def test_groups_of_parameters() -> None:
    model = build_model(MODEL)
    groups = (
        OptimizerGroup(pattern="wk", lr_scale=0.5, weight_decay=0.0),
        OptimizerGroup(pattern="*", optimizer="muon", lr_scale=2.0),
        OptimizerGroup(pattern="tok_embeddings", weight_decay=0.3),
    )
    optimizer = build_optimizer(model, Optimizer(weight_decay=0.1, groups=groups))
    set_learning_rate(optimizer, 0.1)
    found = [(names_of(model, group["params"]), group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    block = ("attention.wq", "attention.wv", "attention.wo", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
    norms = {f"layers.{index}.{name}_norm.weight" for index in (0, 1) for name in ("attention", "ffn")}
    assert found == [
        ({"output.weight"}, 0.1, 0.1),
        (norms | {"norm.weight"}, 0.1, 0.0),
        ({"tok_embeddings.weight"}, 0.1, 0.3),
        ({f"layers.{index}.attention.wk.weight" for index in (0, 1)}, 0.05, 0.0),
        ({f"layers.{index}.{name}.weight" for index in (0, 1) for name in block}, 0.2, 0.1),
    ]


def test_groups_in_a_recipe(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text('[optimizer]\nlr = 0.1\n[[optimizer.groups]]\npattern = "layers"\noptimizer = "muon"\n')
    recipe = load(PretrainRecipe, file)
    assert recipe.optimizer.groups == (MUON,)
    file.write_text(to_toml(recipe))
    assert load(PretrainRecipe, file) == recipe
    override = {"optimizer.groups": '[{pattern = "wq", lr_scale = 2.0}]'}
    assert load(PretrainRecipe, file, override).optimizer.groups == (OptimizerGroup(pattern="wq", lr_scale=2.0),)
