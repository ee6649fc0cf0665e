"""Every shipped recipe loads, passes the checks for its number of processes, and shards over them."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from titanlike.models.registry import build_model
from titanlike.parallelisms.mesh import build_mesh
from titanlike.parallelize import parallelize
from titanlike.recipe.load import joined
from titanlike.run.checks import check_recipe
from titanlike.run.start import program_of
from titanlike.tools.null_gpu.recipes import GPUS_OF
from titanlike.tools.planning.hardware import load_hardware
from titanlike.tools.planning.job import Job
from titanlike.tools.planning.plan import GIB, make_plan
from titanlike.tools.programs import load_known
from titanlike.utils.dtensor import local_tensor

FOLDER = Path(__file__).parents[2] / "train_configs"

AT_SCALE = [name for name, processes in GPUS_OF.items() if processes > 32]


@pytest.mark.parametrize("name", GPUS_OF)
def test_a_shipped_recipe_loads(name: str, tmp_path: Path) -> None:
    path, joined_file = FOLDER / f"{name}.toml", tmp_path / "one.toml"
    ignored: list[str] = []
    recipe = load_known(path, {}, ignored.append)
    assert ignored == []
    check_recipe(recipe, GPUS_OF[name])
    layout = recipe.parallelism
    machine = layout.pipeline * layout.tensor * layout.context
    check_recipe(recipe, max(8, machine))  # `./run_train.sh` takes every GPU of a machine
    program = next(
        (program for program in ("finetune", "dpo", "distill", "mlm", "seq2seq") if program in name), "pretrain"
    )
    program = {"modernbert_base": "mlm", "t5_base": "seq2seq", "stages/chat": "finetune"}.get(name, program)
    assert program_of(path).stem == program
    text = joined(path)
    assert "extends" not in text
    joined_file.write_text(text)
    assert load_known(joined_file, {}) == recipe


def test_an_override_of_a_size_sets_the_fields_of_a_joined_recipe(tmp_path: Path) -> None:
    """They are not written out."""
    (tmp_path / "one.toml").write_text(joined(FOLDER / "llama3_8b_128k.toml"))
    keys = {"model.size": "3.2-1B"}
    assert load_known(tmp_path / "one.toml", keys) == load_known(FOLDER / "llama3_8b_128k.toml", keys)


COMMENTED = re.compile(r"^(\w+) = .*# or \"(\w+)\"(?:, without (\w+))?", re.MULTILINE)


def test_values_that_comments_suggest_are_valid(tmp_path: Path) -> None:
    found = []
    for path in FOLDER.rglob("*.toml"):
        text = path.read_text()
        for line in COMMENTED.finditer(text):
            key, value, absent = line.groups()
            changed = text.replace(line[0], f'{key} = "{value}" #')
            changed = re.sub(rf"^{absent} = .*\n", "", changed, flags=re.MULTILINE) if absent else changed
            file = tmp_path / f"{path.stem}.toml"
            file.write_text(changed)
            check_recipe(load_known(file, {}), GPUS_OF[str(path.relative_to(FOLDER).with_suffix(""))])
            found.append((path.stem, key, value))
    assert ("mlm_debug", "name", "bert") in found


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("gpt2_124m", {}), ("qwen2_5_7b", {}), ("qwen3_30b_a3b", {}), ("gemma3_4b", {}), ("llama3_8b_float8", {}),
        ("llama3_8b_128k", {}), ("deepseek_v2_lite", {}), ("gpt_oss_20b", {}), ("t5_base", {}),
        *(
            pytest.param(name, overrides, marks=pytest.mark.slow)
            for name, overrides in (
                ("modernbert_base", {}), ("distill_llama3_1b", {}), ("mixtral_8x7b", {}), ("deepseek_v3_671b", {}),
                ("gpt_oss_120b", {}), ("gemma2_27b", {}), ("finetune_llama3_8b", {}), ("llama3_70b_float8", {}),
                ("llama3_405b", {}), ("llama3_405b", {"pipeline": "1", "context": "4"}),
            )
        ),
    ],
    ids=str,
)  # fmt: skip
def test_a_shipped_recipe_shards_over_its_number_of_processes(name: str, overrides: dict[str, str]) -> None:
    """Applies the transforms of the recipe at full size, on the meta device and a fake process group."""
    processes = GPUS_OF[name]
    recipe = load_known(FOLDER / f"{name}.toml", {f"parallelism.{key}": n for key, n in overrides.items()})
    check_recipe(recipe, processes)
    layout = recipe.parallelism.resolve(processes)
    shards, split = processes // layout.pipeline, layout.split(recipe.model)
    for stage in {0, layout.pipeline - 1}:
        dist.init_process_group("fake", store=FakeStore(), rank=stage * shards, world_size=processes)
        try:
            with torch.device("meta"):
                model = build_model(recipe.model)
            sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
            model = parallelize(
                model, build_mesh("cpu", **layout.dimensions(), expert=layout.expert), split=split,
                training=recipe.training, parallelism=layout,
                activation_checkpoint=recipe.activation_checkpoint, compile=recipe.compile,
                float8=replace(recipe.float8, emulate=True),
            )  # fmt: skip
            local = {name: local_tensor(parameter) for name, parameter in model.named_parameters()}
            held = sum(sizes[name] for name in local)
            assert held == pytest.approx(
                recipe.model.num_parameters() / layout.pipeline, rel=0 if layout.pipeline == 1 else 0.1
            )
            assert sum(shard.numel() for shard in local.values()) == pytest.approx(held / shards, rel=2e-3)
            assert {shard.dtype for shard in local.values()} == {torch.float32}
        finally:
            dist.destroy_process_group()


@pytest.mark.parametrize("name", AT_SCALE)
def test_a_recipe_at_scale_states_its_gpus_and_the_memory_of_its_plan(name: str) -> None:
    processes = GPUS_OF[name]
    text = " ".join(re.findall(r"^# (.*)", (FOLDER / f"{name}.toml").read_text(), flags=re.MULTILINE))
    plan = make_plan(Job(load_known(FOLDER / f"{name}.toml", {}), processes), load_hardware("h100"))
    stated = re.search(r"Planned memory: (\d+) GiB per GPU", text)
    assert f"{processes} GPUs" in text and stated
    assert plan.fits and int(stated[1]) == pytest.approx(plan.reserved / GIB, rel=0.05)
