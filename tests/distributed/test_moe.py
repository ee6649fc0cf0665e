"""Mixture of experts under every kind of layout: parity with one process, and expert parallelism."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.checkpoints import assert_equal_state, assert_identical, drop_last, reshard, saved_steps
from tests.parity import FLOAT8, MOE_CASES, MOE_MODELS, MUON, Parity, parallelism_of, tiers
from tests.pool import Ranks, user_error
from tests.training import (
    LLAMA,
    SHARED_EXPERTS,
    assert_same,
    build,
    full_tensor,
    mesh_of,
    tiny,
    train,
    train_on_rank,
    world_size,
)
from titanlike.checkpoint.loader import read_whole
from titanlike.config.sections import ActivationCheckpoint, Parallelism
from titanlike.models.common.experts import MixtureOfExperts, Router, routers
from titanlike.models.registry import build_model
from titanlike.optim.balance import BalanceBias
from titanlike.parallelisms.expert import apply_expert
from titanlike.parallelisms.fsdp import apply_fsdp
from titanlike.recipe import PretrainRecipe
from titanlike.utils.dtensor import local_tensor

# Those of the default and of the slow tests; the others run with `-m every`.
QUICK = ("TP x FSDP", "EP x TP", "MLA, EP x TP", "Sinks, EP x TP", "CP x TP, QK-clip, full checkpointing")
SLOW = (
    "FSDP, fewer experts than ranks", "PP zbv", "EP x FSDP", "EP x HSDP", "EP x CP x FSDP", "EP x TP, shared experts, selective",
    "EP x FSDP, compiled, selective", "EP x FSDP, Muon", "EP x TP, LoRA",
    "MLA, PP zbv x TP", "MLA, CP x TP", "MLA, TP x FSDP, Muon",
    "Sinks, PP zbv x TP", "Sinks, CP x TP", "Sinks, EP x FSDP, Muon",
    "MTP, CP x TP, documents", "MTP, EP x TP",
    "MLA, TP x FSDP, QK-clip, compiled, selective", "CP x TP, QK-clip, documents",
)  # fmt: skip


@pytest.mark.parametrize("case", tiers(MOE_CASES, QUICK, SLOW))
def test_layout_matches_one_process(parity: Parity, tmp_path: Path, case: str) -> None:
    model, layout, size, sections = MOE_CASES[case]
    training = dict(steps=2, local_batch_size=size)
    parity(recipe_of(tmp_path, model, layout, training=training, **sections), case, model)


@pytest.mark.slow
def test_a_pipeline_stage_without_experts(parity: Parity, tmp_path: Path) -> None:
    """Its first stage has the dense blocks alone, with one stage on each rank."""
    model = MOE_MODELS["deepseek_v3"]
    dense = model.num_dense_layers
    split = dict(shard=2, expert=2, pipeline=2, pipeline_split=(dense, model.num_layers - dense))
    parity(recipe_of(tmp_path, "deepseek_v3", split, training=dict(steps=2, local_batch_size=1)))


def recipe_of(folder: Path, model: str, layout: dict[str, Any], **sections: Any) -> PretrainRecipe:
    return tiny(folder, "run", model=MOE_MODELS[model], parallelism=parallelism_of(layout), **sections)


def _initial_weights(recipe: PretrainRecipe) -> dict[str, Tensor]:
    model, _ = build(recipe)
    return {name: full_tensor(parameter) for name, parameter in model.named_parameters()}


LAYOUTS: dict[str, dict[str, Any]] = {
    "FSDP": dict(shard=4),
    "TP x FSDP": dict(tensor=2, shard=2),
    "EP": dict(shard=4, expert=4),
    "EP x FSDP": dict(shard=4, expert=2),
    "EP x HSDP": dict(replicate=2, shard=2, expert=2),
    "EP x TP": dict(tensor=2, shard=2, expert=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("model", MOE_MODELS)
def test_initial_weights_match_one_process(ranks: Ranks, tmp_path: Path, model: str) -> None:
    expected = ranks(1).run(_initial_weights, recipe_of(tmp_path, model, {}))[0]
    for name, layout in LAYOUTS.items():
        if MOE_MODELS[model].num_experts % layout.get("expert", 1) == 0:
            for found in ranks(4).run(_initial_weights, recipe_of(tmp_path, model, layout)):
                assert found.keys() == expected.keys()
                assert not [key for key, value in expected.items() if not torch.equal(found[key], value)], name


EIGHT_BIT: dict[str, Any] = {"optimizer": dict(state_dtype="8bit")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections",
    [{}, pytest.param(EIGHT_BIT, marks=pytest.mark.every), {"optimizer": MUON}],
    ids=["AdamW", "8bit", "Muon"],
)
def test_checkpoints_load_under_other_layouts(ranks: Ranks, tmp_path: Path, sections: dict[str, Any]) -> None:
    """Saves under each layout, loads under the next one, and compares what that saves."""
    options: dict[str, Any] = dict(training=dict(steps=2), checkpoint=dict(interval=1), **sections)
    model = replace(SHARED_EXPERTS, dim=128, ffn_dim=128)  # whole blocks of 8-bit states on each tensor-parallel rank
    layouts = [
        layout
        for layout in (LAYOUTS[name] for name in ("TP x FSDP", "EP", "EP x HSDP", "EP x TP"))
        if not sections.get("optimizer", {}).get("groups") or "tensor" not in layout
    ]
    recipes = [
        tiny(tmp_path, f"run{index}", model=model, parallelism=Parallelism(**layout), **options)
        for index, layout in enumerate(layouts)
    ]
    for index, recipe in enumerate(recipes):
        saved = train(ranks(4), recipe).state
        assert {"layers.0.feed_forward.experts.w1", "layers.0.feed_forward.router.expert_bias"} <= saved["model"].keys()
        assert_equal_state(reshard(ranks(4), recipe, recipes[index - 1], tmp_path / f"moved {index}"), saved)


@pytest.mark.slow
def test_resume_is_bitwise_exact(ranks: Ranks, tmp_path: Path) -> None:
    options = dict(training=dict(steps=4), checkpoint=dict(interval=2))
    recipe = recipe_of(tmp_path, "shared experts", LAYOUTS["EP x TP"], **options)
    expected = train(ranks(4), recipe)
    drop_last(tmp_path / "run")
    assert_identical(train(ranks(4), recipe), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        dict(balance_loss=0.0),
        dict(balance_bias_rate=0.0),
        dict(router_score="softmax"),
        dict(router_scale=1.0),
        dict(normalize_router=False),
        dict(num_shared_experts=0),
        dict(experts_per_token=1),
    ],
    ids=lambda options: next(iter(options)),
)
def test_an_option_changes_the_training(ranks: Ranks, tmp_path: Path, options: dict[str, Any]) -> None:
    """Otherwise the parity above would hold for an option that does nothing."""
    results = [
        train(ranks(1), tiny(tmp_path, name, model=model, training=dict(steps=3, local_batch_size=8)))
        for name, model in (("with", SHARED_EXPERTS), ("without", replace(SHARED_EXPERTS, **options)))
    ]
    assert results[0].losses[2] != results[1].losses[2]


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


def test_the_state_has_a_bias_of_each_router_and_no_moments_of_it(ranks: Ranks, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "shared experts", dict(shard=2, expert=2), training=dict(steps=1))
    state = train(ranks(2), recipe).state
    biases = {name: value for name, value in state["model"].items() if name.endswith("expert_bias")}
    assert len(biases) == SHARED_EXPERTS.num_layers
    rate = SHARED_EXPERTS.balance_bias_rate
    assert {round(value / rate, 3) for bias in biases.values() for value in bias.tolist()} <= {-1.0, 0.0, 1.0}
    assert any(bool(bias.any()) for bias in biases.values())
    assert not [name for name in state["optimizer"] if "expert_bias" in name]


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


BFLOAT16: dict[str, Any] = dict(
    training=dict(steps=4, compute_dtype="bfloat16", master_dtype="bfloat16"),
    optimizer=dict(stochastic_rounding=True),
    checkpoint=dict(interval=2),
)


def _train_as_before(recipe: PretrainRecipe) -> None:
    """Trains as versions that kept the bias in the master dtype."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Router, "float32_parameters", ())
        train_on_rank(recipe)


def _biases(state: Mapping[str, Mapping[str, Tensor]]) -> Tensor:
    return torch.cat([value for name, value in sorted(state["model"].items()) if name.endswith("expert_bias")])


def test_a_checkpoint_with_a_bias_in_bfloat16_is_resumed_in_float32(ranks: Ranks, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "shared experts", {}, **BFLOAT16)
    ranks(1).run(_train_as_before, recipe)
    drop_last(tmp_path / "run")
    (step,) = saved_steps(tmp_path / "run")
    before = _biases(read_whole(step))
    assert before.dtype == torch.bfloat16 and before.any()
    for layout in (dict(shard=2), dict(tensor=2)):
        found = train(ranks(2), replace(recipe, parallelism=parallelism_of(layout))).state
        after = _biases(found)
        assert after.dtype == torch.float32
        assert found["model"]["layers.0.feed_forward.router.weight"].dtype == torch.bfloat16
        # Two further steps, each of the size of the rate, or 0.
        steps = (after - before.float()) / SHARED_EXPERTS.balance_bias_rate
        assert {round(step, 3) for step in steps.tolist()} <= {-2.0, -1.0, 0.0, 1.0, 2.0} and steps.any()
        drop_last(tmp_path / "run")


@pytest.mark.slow
def test_float8_converts_attention_only(ranks: Ranks, tmp_path: Path) -> None:
    one, plain, several = (
        train(ranks(size), recipe_of(tmp_path / name, "shared experts", chosen, training=dict(steps=1), **sections))
        for name, size, chosen, sections in (
            ("one", 1, {}, {"float8": FLOAT8}),
            ("plain", 1, {}, {}),
            ("several", 4, LAYOUTS["EP x TP"], {"float8": FLOAT8}),
        )
    )
    assert one.losses[0] != plain.losses[0]
    # A token whose scores are almost equal may get another expert.
    assert_same(several, one, loss=1e-4, norm=1e-3, weights=1.0)


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


def _refused(dense: bool) -> str:
    mesh = mesh_of("cpu", shard=2, expert=2)
    with torch.device("meta"):
        model: nn.Module = build_model(LLAMA if dense else replace(SHARED_EXPERTS, num_experts=3))
    return user_error(apply_expert, model, mesh.expert)


def test_what_cannot_be_distributed_is_refused(ranks: Ranks) -> None:
    assert (
        ranks(2).run(_refused, True)
        == ["Llama has no MixtureOfExperts (titanlike.models.common.experts) to distribute"] * 2
    )
    assert "2 expert-parallel ranks do not divide the 3 experts of w1" in ranks(2).run(_refused, False)[0]
