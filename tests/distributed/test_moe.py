"""Mixture of experts under every kind of layout: parity with one process, and expert parallelism."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parity import MOE_CASES, MOE_MODELS, Parity, parallelism_of, rows_of
from tests.pool import Ranks
from tests.training import (
    SHARED_EXPERTS,
    build,
    deep,
    full_tensor,
    mesh_of,
    tiny,
    world_size,
)
from titanlike.config.sections import ActivationCheckpoint
from titanlike.models.common.experts import MixtureOfExperts, Router, routers
from titanlike.optim.balance import BalanceBias
from titanlike.parallelisms.expert import apply_expert
from titanlike.parallelisms.fsdp import apply_fsdp
from titanlike.recipe import PretrainRecipe
from titanlike.utils.dtensor import local_tensor


@pytest.mark.parametrize(("model", "layout", "size", "sections"), rows_of(MOE_CASES))
def test_layout_matches_one_process(
    parity: Parity, tmp_path: Path, request: pytest.FixtureRequest,
    model: str, layout: dict[str, Any], size: int, sections: dict[str, Any],
) -> None:  # fmt: skip
    training = dict(steps=2, local_batch_size=size)
    parity(recipe_of(tmp_path, model, layout, training=training, **sections), request.node.callspec.id, model)


def recipe_of(folder: Path, model: str, layout: dict[str, Any], **sections: Any) -> PretrainRecipe:
    shape = deep(MOE_MODELS[model]) if "pipeline" in layout else MOE_MODELS[model]
    return tiny(folder, "run", model=shape, parallelism=parallelism_of(layout), **sections)


def test_the_bias_balances_the_load() -> None:
    torch.manual_seed(0)
    router = Router(replace(SHARED_EXPERTS, balance_loss=0.0))
    nn.init.normal_(router.weight, std=0.1)
    nn.init.zeros_(router.expert_bias)
    x = torch.randn(8, 32, SHARED_EXPERTS.dim) + 1.0  # a common direction, which some experts have large scores for
    optimizer = BalanceBias([router], rate=0.01)
    imbalance = []
    for _ in range(100):
        _, _, load, counts = router(x)
        router.add_load(counts)
        optimizer.step()
        optimizer.zero_grad()
        total = load.sum(0).float()
        imbalance.append((total.max() / total.mean()).item())
    assert imbalance[0] > 1.4 and max(imbalance[-10:]) < 1.1


def _bias_of_loads(layout: dict[str, int], loads: list[list[int]]) -> list[float]:
    """Returns the bias after a step in which each rank routes as many tokens to each expert as given, with FSDP in bfloat16."""
    mesh = mesh_of("cpu", **layout)
    load = loads[mesh.data_rank]
    router = Router(replace(SHARED_EXPERTS, dim=8, num_experts=len(load), experts_per_token=1, balance_loss=0.0))
    nn.init.eye_(router.weight)
    nn.init.zeros_(router.expert_bias)
    apply_fsdp(router, mesh.fsdp, units=[], compute_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    optimizer = BalanceBias([router], rate=0.125)
    x = torch.eye(8, dtype=torch.bfloat16)[: len(load)].repeat_interleave(torch.tensor(load), 0)
    weights, _, _, counts = router(x[None])
    router.add_load(counts)
    weights.sum().backward()
    optimizer.step()
    return full_tensor(router.expert_bias).tolist()


@pytest.mark.parametrize("layout", [dict(shard=2), dict(replicate=2)], ids=str)
def test_the_load_is_summed_exactly_in_bfloat16(ranks: Ranks, layout: dict[str, int]) -> None:
    """Above and below the average of a rank are 257 and 256 tokens, which are one number in bfloat16."""
    loads = [[1057, 543, 800, 800, 800], [544, 1056, 800, 800, 800]]
    assert ranks(2).run(_bias_of_loads, layout, loads) == [[-0.125, 0.125, 0.0, 0.0, 0.0]] * 2


def _routing(recipe: PretrainRecipe) -> list[tuple[int, int]]:
    """Returns for each router the number of tokens, and of those that have other experts than by scores and a bias in float32."""
    model, mesh = build(recipe)
    found: list[tuple[int, int]] = []
    for router in routers(model):
        bias = local_tensor(router.expert_bias)  # type: ignore[arg-type]
        assert bias.dtype == torch.float32 and bias.shape == (recipe.model.num_experts,)
        bias.copy_(3.0 + 0.011 * torch.arange(len(bias)))  # numbers that bfloat16 does not have
        weight = full_tensor(router.weight).bfloat16().float()

        def compare(_: nn.Module, inputs: Any, routes: Any, weight: Tensor = weight, bias: Tensor = bias) -> None:
            x = inputs[0]
            assert x.dtype == torch.bfloat16
            ranking = (x.float() @ weight.T).sigmoid() + bias
            expected = ranking.topk(recipe.model.experts_per_token).indices.sort(-1).values
            differ = (routes.indices.sort(-1).values != expected).any(-1)
            found.append((differ.numel(), int(differ.sum())))

        router.register_forward_hook(compare)
    tokens = torch.randint(320, (16, 32), generator=torch.Generator().manual_seed(mesh.data_rank))
    model(tokens, labels=tokens).backward()
    return found


@pytest.mark.parametrize(
    ("layout", "sections"),
    [
        ({}, {}),
        (dict(shard=2), {}),
        (dict(replicate=2), {}),
        (dict(tensor=2), {}),
        (dict(shard=2, expert=2), {}),
        (dict(context=2), {}),
        (dict(tensor=2, shard=2, expert=2), dict(activation_checkpoint=ActivationCheckpoint(mode="full"))),
    ],
    ids=str,
)
def test_the_experts_of_tokens_are_those_of_float32_under_every_layout(
    ranks: Ranks, tmp_path: Path, layout: dict[str, Any], sections: dict[str, Any]
) -> None:
    training = dict(compute_dtype="bfloat16", master_dtype="bfloat16")
    recipe = recipe_of(tmp_path, "shared experts", layout, training=training, **sections)
    for found in ranks(world_size(recipe)).run(_routing, recipe):
        assert len(found) == SHARED_EXPERTS.num_layers * (2 if sections else 1)
        assert sum(tokens for tokens, _ in found) >= 512 and not sum(others for _, others in found)


def _standalone(layout: dict[str, int], all_on_first: bool = False) -> dict[str, Tensor]:
    """Returns the gradients of an ordinary mean loss of a module that is not a registered model, on this rank's half of a batch."""
    torch.manual_seed(0)
    config = replace(SHARED_EXPERTS, balance_loss=0.0, balance_bias_rate=0.0)
    model = nn.Sequential(nn.Linear(16, config.dim), *(MixtureOfExperts(config) for _ in range(2)))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    for router in routers(model) if all_on_first else ():
        router.expert_bias = nn.Parameter(torch.tensor([9.0, 8.0, 0.0, 0.0]), requires_grad=False)
    batch = torch.randn(4, 8, 16)
    if layout:
        mesh = mesh_of("cpu", **layout)
        assert mesh.expert is not None and mesh.expert_fsdp is not None
        experts = apply_expert(model, mesh.expert)
        apply_fsdp(model, mesh.fsdp, units=list(model), inner_units=dict.fromkeys(experts, mesh.expert_fsdp))
        batch = batch.chunk(mesh.num_data_ranks)[mesh.data_rank]
    model(batch).square().mean().backward()
    return {
        name: full_tensor(parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None
    }


@pytest.mark.parametrize(
    ("layout", "all_on_first"),
    [
        (dict(shard=2, expert=2), False),
        (dict(shard=4, expert=2), False),
        (dict(replicate=2, shard=2, expert=2), False),
        (dict(shard=2, expert=2), True),  # the second rank computes no token
    ],
    ids=str,
)
def test_experts_of_any_module_with_a_mean_loss(ranks: Ranks, layout: dict[str, int], all_on_first: bool) -> None:
    expected = ranks(1).run(_standalone, {}, all_on_first)[0]
    assert all_on_first != bool(expected["1.experts.w1"][2:].any())
    for found in ranks(layout["shard"] * layout.get("replicate", 1)).run(_standalone, layout, all_on_first):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert (found[name] - value).abs().max() <= 1e-4 * value.abs().max(), name
