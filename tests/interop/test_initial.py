"""Runs that start from weights, under any layout, and runs that end with an export."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.interop.models import CONFIGS, export_model, model_of
from tests.pool import Ranks
from tests.training import tiny, train, train_on_rank
from titanlike.config import UserError
from titanlike.config.dpo import PreferenceData
from titanlike.config.finetune import Lora
from titanlike.config.sections import Checkpoint, Parallelism
from titanlike.interop.weights import open_weights
from titanlike.recipe.dpo import DpoRecipe
from titanlike.run.checks import check_machine, check_recipe
from titanlike.run.precomputation import version_of_weights
from titanlike.run.run_dir import run_metadata

LAYOUTS = {
    "TP-FSDP": (4, Parallelism(tensor=2)),
    "PP": (2, Parallelism(pipeline=2)),
    "FSDP": (2, Parallelism()),
    "EP-TP": (4, Parallelism(tensor=2, expert=2)),
}


def recipe_from(folder: Path, initial: Path, name: str, **sections: Any) -> Any:
    sections["checkpoint"] = {"initial": str(initial)} | sections.get("checkpoint", {})
    # Weights change by less than rounding in one step at this learning rate.
    return tiny(
        folder, name, training=dict(steps=1), optimizer=dict(lr=1e-12), schedule=dict(warmup_steps=0, decay="none"),
        validation=dict(interval=0, batches=8), **sections,
    )  # fmt: skip


def test_frozen_weights_are_identified_by_their_content(alone: None, tmp_path: Path) -> None:
    """Wherever the folder is, and of whatever kind."""
    config = replace(CONFIGS["Llama 3.2"], vocab_size=304)

    def found(folder: Path) -> dict[str, str]:
        recipe = DpoRecipe(model=config, checkpoint=Checkpoint(initial=str(folder)))
        return run_metadata(recipe, "", "", {}, torch.device("cpu")).weights

    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        export_model(model_of(config, seed), config, tmp_path / name)
        recipe = recipe_from(tmp_path, tmp_path / name, f"run_{name}", model=config)
        train_on_rank(recipe)
    for prefix in ("", "run_"):
        one, same, other = (found(tmp_path / f"{prefix}{name}") for name in ("one", "same", "other"))
        assert one == same and one.keys() == other.keys() == {"checkpoint.initial"} and one != other
    assert found(tmp_path / "one") != found(tmp_path / "run_one")
    versions = [version_of_weights(str(tmp_path / name), 0) for name in ("one", "run_one")]
    for file in tmp_path.rglob("*.safetensors"):
        os.utime(file, (1, 1))  # as after a change of what is not in the samples
    changed = [version_of_weights(str(tmp_path / name), 0) for name in ("one", "run_one")]
    assert changed[0] != versions[0] and changed[1] == versions[1]
    adapters = DpoRecipe(lora=Lora(rank=4), checkpoint=Checkpoint(initial=str(tmp_path / "one")))
    assert run_metadata(adapters, "", "", {}, torch.device("cpu")).weights == {}  # its checkpoint has them


def test_a_resumed_run_does_without_the_weights_it_started_from(tmp_path: Path) -> None:
    recipe = recipe_from(tmp_path, tmp_path / "gone", "run")
    with pytest.raises(UserError, match="is not a folder"):
        check_machine(recipe)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/environment.json").touch()
    check_machine(recipe)
    with pytest.raises(UserError, match="is not a folder"):
        check_machine(
            DpoRecipe(run=recipe.run, checkpoint=recipe.checkpoint, data=PreferenceData(source="synthetic_preference"))
        )


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("TP-FSDP", "Llama 3.2"),
        ("PP", "GPT-2"),
        pytest.param("TP-FSDP", "Phi-3", marks=pytest.mark.slow),
        pytest.param("EP-TP", "Qwen3-MoE", marks=pytest.mark.slow),
        pytest.param("FSDP", "Llama 3.2", marks=pytest.mark.slow),
    ],
)
def test_a_run_starts_from_a_folder_under_any_layout(ranks: Ranks, tmp_path: Path, layout: str, model: str) -> None:
    config = replace(CONFIGS[model], vocab_size=304)
    expected = model_of(config)
    export_model(expected, config, tmp_path / "hf")
    world_size, parallelism = LAYOUTS[layout]
    training = recipe_from(
        tmp_path, tmp_path / "hf", "run", model=config, parallelism=parallelism, checkpoint=dict(export="float32")
    )
    check_recipe(training, world_size)
    check_machine(training)
    found = train(ranks(world_size), training)
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(found.state["model"][name], parameter.data, atol=1e-7, rtol=1e-7)
    # The export at the end, and a second run from it, from the run and from the checkpoint.
    for number, source in enumerate(("run/hf", "run", "run/checkpoints/step-00000001")):
        weights = open_weights(tmp_path / source)
        assert weights.config == config
        again = recipe_from(tmp_path, tmp_path / source, f"again{number}", model=config, checkpoint=dict(export="none"))
        if layout == "FSDP":
            state = train(ranks(2), again).state["model"]
            for name, value in found.state["model"].items():
                torch.testing.assert_close(state[name], value, atol=1e-7, rtol=1e-7)


def refusal(recipe: Any) -> str:
    with pytest.raises(UserError) as error:
        train_on_rank(recipe)
    return str(error.value)


def test_another_model_is_refused_before_the_start_and_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    config = CONFIGS["grouped-query"]
    export_model(model_of(config), config, tmp_path / "hf")
    changes = {"num_layers": 2, "rope_theta": 1e6, "max_seq_len": 128}
    other = replace(config, **changes)
    wrong = recipe_from(tmp_path, tmp_path / "hf", "run", model=other)
    message = (
        r"^checkpoint.initial = '.*/hf' has num_layers = 3, but model.num_layers = 2; `titanlike import` writes .*\n"
        r"checkpoint.initial = '.*/hf' has rope_theta = 500000.0, but model.rope_theta = 1000000.0; .*$"
    )
    with pytest.raises(UserError, match=message):
        check_machine(wrong)
    assert all("has num_layers = 3" in error for error in ranks(2).run(refusal, wrong))
    allowed = recipe_from(
        tmp_path, tmp_path / "hf", "run", model=replace(config, rope_theta=1e6),
        checkpoint=dict(allow_changed=("model.rope_theta",)),
    )  # fmt: skip
    check_machine(allowed)


def test_experts_may_be_trained_with_another_auxiliary_loss(tmp_path: Path) -> None:
    config: Any = CONFIGS["Qwen3-MoE"]
    export_model(model_of(config), config, tmp_path / "hf")
    check_machine(recipe_from(tmp_path, tmp_path / "hf", "run", model=replace(config, balance_loss=0.1)))
    biased = recipe_from(tmp_path, tmp_path / "hf", "run", model=replace(config, balance_bias_rate=1e-3))
    with pytest.raises(UserError, match=r"^checkpoint.initial = '.*/hf' has balance_bias_rate = 0.0, but .*$"):
        check_machine(biased)


def test_options_without_an_equivalent_are_refused_before_training(tmp_path: Path) -> None:
    model: Any = replace(CONFIGS["Qwen3-MoE"], vocab_size=304, router_scale=2.5)  # type: ignore[call-arg]
    check_recipe(tiny(tmp_path, "run", model=model), 1)
    with pytest.raises(UserError, match=r"^checkpoint.export: model.router_scale = 2.5 has no equivalent in Qwen3Moe"):
        check_recipe(tiny(tmp_path, "run", model=model, checkpoint=dict(export="float32")), 1)


def test_a_parameter_that_the_initial_weights_lack_is_named(ranks: Ranks, tmp_path: Path) -> None:
    config: Any = replace(CONFIGS["Qwen3-MoE"], vocab_size=304)
    export_model(model_of(config), config, tmp_path / "hf")
    allowed = dict(allow_changed=("model.balance_bias_rate",))
    recipe = recipe_from(
        tmp_path, tmp_path / "hf", "run", model=replace(config, balance_bias_rate=1e-3), checkpoint=allowed
    )
    [error] = ranks(1).run(refusal, recipe)
    biases = ", ".join(f"layers.{index}.feed_forward.router.expert_bias" for index in range(3))
    assert f"hf': there is no {biases}, but the recipe's model has (6,); use other weights" in error


def test_blocks_of_multi_token_prediction_that_the_initial_weights_lack(ranks: Ranks, tmp_path: Path) -> None:
    config: Any = replace(CONFIGS["DeepSeek-V3"], vocab_size=304)
    export_model(model_of(config), config, tmp_path / "hf")
    recipe = recipe_from(tmp_path, tmp_path / "hf", "run", model=replace(config, num_mtp_layers=2))
    [error] = ranks(1).run(refusal, recipe)
    expected = "hf' has 0 blocks of multi-token prediction, but model.num_mtp_layers = 2; set it to 0"
    assert error.endswith(expected) and "\n" not in error


def test_a_resume_does_not_read_the_initial_weights_again(ranks: Ranks, tmp_path: Path) -> None:
    config = CONFIGS["grouped-query"]
    export_model(model_of(config), config, tmp_path / "hf")
    first = recipe_from(tmp_path, tmp_path / "hf", "run", model=config)
    before = train(ranks(1), first).state["model"]
    (tmp_path / "hf/config.json").unlink()
    after = train(ranks(1), replace(first, training=replace(first.training, steps=2)))
    assert after.state["model"].keys() == before.keys()
