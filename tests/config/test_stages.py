"""Stages: recipes that are trained one after the other. Interrupted ones are in `tests/faults/test_interrupted_stages.py`."""

import json
from pathlib import Path

import pytest

from tests.launching import Cli
from titanlike.config import UserError
from titanlike.config.shipped import RECIPES
from titanlike.tools.stages import load_stages

NAMES = ("stages/pretrain", "stages/decay", "stages/chat")
PATHS = [RECIPES / f"{name}.toml" for name in NAMES]


def test_the_shipped_stages_continue_each_other() -> None:
    stages = load_stages(PATHS, {"model.dim": "64"}, "mine")
    assert [str(stage.folder) for stage in stages] == ["runs/mine-pretrain", "runs/mine-decay", "runs/mine-chat"]
    assert {stage.recipe.model.dim for stage in stages} == {64}, "overrides apply to every stage"
    assert not any(stage.is_trained for stage in stages)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\nnum_layers = 3", "model.num_layers = 3, but the weights of FIRST were trained with 4; restore it"),
        ("[model]\nrope_theta = 5.0", "set checkpoint.allow_changed = ['model.rope_theta']"),
        ('[model]\nname = "qwen3"\nhead_dim = 48', "model.name = 'qwen3', but the weights of FIRST are a llama model"),
        ('[checkpoint]\ninitial = "base"', "checkpoint.initial = 'base', but a stage starts from the weights of the one before"),
        ('[tokenizer]\nencoding = "gpt2"', "tokenizer.encoding = 'gpt2', but the weights of FIRST were trained with 'bytes'"),
    ],
)  # fmt: skip
def test_a_stage_fits_the_weights_of_the_one_before(text: str, message: str, tmp_path: Path) -> None:
    first, second = RECIPES / "debug.toml", tmp_path / "second.toml"
    is_other_family = "qwen3" in text
    second.write_text(
        f'extends = "{first}"\n{text}' if not is_other_family else f"{text}\n[tokenizer]\nencoding = 'bytes'"
    )
    with pytest.raises(UserError) as raised:
        load_stages([first, second], {}, "mine")
    assert f"{second}: " in str(raised.value) and message.replace("FIRST", str(first)) in str(raised.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--checkpoint.enabled=false", "--checkpoint.export=none"), "debug.toml: checkpoint.enabled = false, but"),
        (("--checkpoint.dir=s3://bucket/runs",), "checkpoint.dir = 's3://bucket/runs' is a URL"),
        (("--checkpoint.resume_from=2",), "--checkpoint.resume_from are for one recipe"),
        (("--resolved",), "--resolved, --program"),
        (("stages/pretrain",), "would be one run"),
        (("--training.local_batch_size=3", "--parallelism.tensor=2"), "parallelism"),
    ],
)
def test_what_several_recipes_refuse(options: tuple[str, ...], message: str, cli: Cli) -> None:
    assert message in cli("train", "debug", NAMES[0], *options, code=2).err


def test_a_plan_of_stages_is_the_sum_of_their_plans(cli: Cli) -> None:
    separate = [json.loads(cli("plan", name, "--gpus", "2", "--json").out) for name in NAMES]
    together = json.loads(cli("plan", *NAMES, "--gpus", "2", "--json").out)
    assert [stage["step_seconds"] for stage in together["stages"]] == [plan["step_seconds"] for plan in separate]
    for key in ("run_seconds", "run_dollars"):
        assert together[key] == pytest.approx(sum(plan[key] for plan in separate))
        low, high = together[f"{key}_range"]
        assert low < together[key] < high
    printed = cli("plan", *NAMES, "--gpus", "2").out
    assert all(path.stem in printed for path in PATHS) and "\nall" in printed
    assert "--search is for one recipe" in cli("plan", *NAMES, "--gpus", "2", "--search", code=2).err
