"""Configs of torchtitan 0.3 as recipes. `benchmarks.migration` does the same with all configs that torchtitan 0.3.0 builds."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launching import Cli
from tests.torchtitan_configs import config, group, linear
from titanlike.config import UserError
from titanlike.recipe import PretrainRecipe, load
from titanlike.run.checks import check_recipe
from titanlike.tools.migration.conversion import Conversion
from titanlike.tools.migration.formats import convert
from titanlike.tools.migration.torchtitan_config import DUMP

QUANTIZATION = "torchtitan.components.quantization"


def titan(folder: Path, values: dict[str, Any]) -> tuple[Conversion, PretrainRecipe]:
    """Converts a config, whose recipe has to be valid on 8 processes."""
    path = folder / "job.json"
    path.write_text(json.dumps(values))
    job = convert(path, 8)
    assert job is not None
    assert job.mapped.keys() | job.not_mapped.keys() == job.given.keys()
    assert not job.mapped.keys() & job.not_mapped.keys()
    recipe = folder / "converted.toml"
    recipe.write_text(job.text())
    loaded = load(PretrainRecipe, recipe)
    check_recipe(loaded, 8)
    return job, loaded


def lost(job: Conversion) -> set[str]:
    return {one.key for one in job.not_mapped.values() if one.changes}


def test_a_llama_by_its_numbers(tmp_path: Path) -> None:
    job, recipe = titan(tmp_path, config())
    model = recipe.model
    # Embedding and head; norms; queries, keys, values and output; the feed-forward layers.
    assert model.num_parameters() == 2 * 256 * 64 + 7 * 64 + 3 * 4 * 64 * 64 + 3 * 3 * 64 * 96
    assert (model.name, model.num_kv_heads, model.max_seq_len) == ("llama", 4, 4096)
    assert (model.rope_scaling, model.norm_eps) == (8.0, 1e-5)
    assert recipe.data.document_masks and recipe.data.path.endswith("c4-train.*.json.gz")
    assert (recipe.training.global_batch_size, recipe.training.local_batch_size) == (16, 2)
    assert recipe.training.loss_chunk == 256  # 2 x 1,024 tokens in 8 chunks
    assert (recipe.activation_checkpoint.mode, recipe.compile.mode) == ("selective", "block")
    text = job.text()
    assert "ffn_dim = 96                             # model_spec.model.layers.feed_forward.w1.out_features" in text
    assert 'encoding = "assets"                      # hf_assets_path' in text
    assert "beta2 = 0.95                             # optimizer.param_groups.beta2" in text
    assert '#   validator.dataloader.dataset = "c4_validation": validation is off' in text
    assert lost(job) == set()
    for note in (
        "CUDA graphs: ",
        "compile: blocks are compiled here",
        "initial weights: normal with a standard deviation of 1",
    ):
        assert any(one.startswith(note) for one in job.differences), note


def test_a_qwen3_with_experts(tmp_path: Path) -> None:
    values = config("qwen3")
    values["training"]["seq_len"] = 8192
    job, recipe = titan(tmp_path, values)
    model: Any = recipe.model
    assert (model.name, model.head_dim, model.num_kv_heads, model.ffn_dim) == ("qwen3_moe", 32, 2, 32)
    assert (model.num_experts, model.experts_per_token, model.balance_bias_rate) == (8, 2, 1e-3)
    assert model.max_seq_len == 8192 and model.rope_scaling == 1.0
    dispatcher = "model_spec.model.layers.moe.routed_experts.token_dispatcher"
    assert job.not_mapped[dispatcher].value == "DeepEPTokenDispatcher" and lost(job) == set()
    assert any("0.02 / sqrt(2 * num_layers); here the latter" in text for text in job.differences)
    for block in values["model_spec"]["model"]["layers"]:
        block |= {"moe": None, "feed_forward": config()["model_spec"]["model"]["layers"][0]["feed_forward"]}
    assert titan(tmp_path, values)[1].model.name == "qwen3"


def replaced(values: dict[str, Any], kind: str, where: Callable[[str], bool], **fields: Any) -> dict[str, Any]:
    """Replaces linear layers of a config by their names."""

    def visit(node: Any, path: str) -> None:
        for key, child in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
            name = f"{path}.{key}".strip(".")
            if isinstance(child, dict) and child.get("class") == linear(1, 1)["class"] and where(name):
                node[key] = child | {"class": f"{QUANTIZATION}.{kind}.Config", **fields}
            visit(child, name)

    visit(values["model_spec"]["model"], "")
    return values


def test_quantized_layers(tmp_path: Path) -> None:
    precise = {"cast_config_input_for_grad_weight": {"scaling_type": "disabled"}, "emulate": False}
    values = replaced(
        config(), "float8.Float8Linear", lambda name: name != "lm_head", _torchao_config={"emulate": True}
    )
    found = titan(tmp_path, values)[1].float8
    assert (found.scaling, found.emulate, found.head, found.layers, found.skip) == ("rowwise", True, False, ("*",), ())
    values = replaced(
        config(),
        "float8.Float8Linear",
        lambda name: "layers.2" not in name and "wqkv" not in name,
        _torchao_config=precise,
    )
    found = titan(tmp_path, values)[1].float8
    assert (found.scaling, found.head) == ("rowwise_with_gw_hp", True)
    assert set(found.skip) == {"attention.wq", "attention.wk", "attention.wv", "layers.2"}
    values = replaced(config(), "mx.MXFP8Linear", lambda name: True)
    assert (titan(tmp_path, values)[1].float8.scaling, titan(tmp_path, values)[1].float8.head) == ("mxfp8", True)
    job, recipe = titan(tmp_path, replaced(config(), "nvfp4.NVFP4Linear", lambda name: name.startswith("layers.0")))
    assert recipe.float8.scaling == "none" and lost(job) == {"converters"}


def test_groups_of_parameters(tmp_path: Path) -> None:
    values = config("qwen3")
    values["optimizer"]["param_groups"] = [
        group(r"(tok_embeddings|lm_head)\.", weight_decay=0.0),
        group(r"router\.gate", "Adam", lr=1e-4, weight_decay=0.0),
        group(r"layers\.1\.", betas=[0.8, 0.95]),
        group(r"\.wqkv\.", lr=2e-3),
        group(".*"),
    ]
    job, recipe = titan(tmp_path, values)
    found = {name: recipe.optimizer.group_of(name, is_matrix=True) for name in recipe.model.parameters()}
    scales = {name: (one and round(one.lr_scale, 6), one and one.weight_decay) for name, one in found.items()}
    assert scales["tok_embeddings.weight"] == scales["output.weight"] == (1.0, 0.0)
    assert scales["layers.1.feed_forward.router.weight"] == (0.1, 0.0)
    assert scales["layers.0.attention.wk.weight"] == (2.0, 0.1)
    assert scales["layers.1.attention.wk.weight"] == scales["layers.0.attention.wo.weight"] == (1.0, 0.1)
    assert any("optimizer.param_groups.2: beta1 = 0.8" in text for text in job.differences)
    values["optimizer"] = {
        "implementation": "fused_opt_states_bf16",
        "param_groups": [group("norm"), group(".*", lr=3e-4)],
    }
    recipe = titan(tmp_path, values)[1]
    assert recipe.optimizer.state_dtype == "bfloat16" and recipe.optimizer.lr == 3e-4
    values["optimizer"]["param_groups"] = [group(".*", "DistMuon")]
    with pytest.raises(UserError, match=r"optimizer.param_groups: no group has AdamW"):
        titan(tmp_path, values)


def test_what_has_no_counterpart_is_named(tmp_path: Path) -> None:
    values = config()
    values |= {
        "metrics": {"class": "mine.Metrics.Config", "log_freq": 5},
        "parallelism": {"spmd_backend": "full_dtensor", "enable_sequence_parallel": False},
        "training": values["training"] | {"disable_cuda_graphs": True, "stepz": 3},
    }
    job, recipe = titan(tmp_path, values)
    assert lost(job) == {"metrics.class", "training.stepz", "parallelism.enable_sequence_parallel"}
    assert job.not_mapped["metrics.class"].reason.startswith("code of your own")
    assert not job.not_mapped["parallelism.spmd_backend"].changes and recipe.metrics.interval == 5
    assert not any(text.startswith("CUDA graphs") for text in job.differences)


def first_block(values: dict[str, Any]) -> Any:
    values["model_spec"]["model"]["layers"] = values["model_spec"]["model"]["layers"][:1]
    return values["model_spec"]["model"]["layers"][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values["model_spec"].update(name="deepseek_v3"), 'model_spec.name = "deepseek_v3": its jobs are not conv'),
        (lambda values: values["model_spec"]["model"]["layers"][1]["ffn_norm"].update(eps=1.0), "blocks differ are not converted"),
        (lambda values: first_block(values)["attention"]["wo"].update(bias=True), "wo.bias = true: no model of this toolkit"),
        (lambda values: first_block(values)["attention"]["wo"].update({"class": "x.LoRALinear.Config"}), "adapters are not conv"),
        (lambda values: first_block(values)["attention"].pop("rope"), "as torchtitan_dump.py prints it: KeyError"),
        (lambda values: values["model_spec"]["model"].update(dim="64"), "model_spec.model.dim = \"64\" must be of type int"),
    ],
)  # fmt: skip
def test_what_is_no_model_here_is_refused(tmp_path: Path, change: Callable[[Any], object], message: str) -> None:
    values = config()
    change(values)
    with pytest.raises(UserError) as error:
        titan(tmp_path, values)
    assert message in str(error.value)


FAKE = """
import sys
from dataclasses import dataclass
from torchtitan.config import configs
from torchtitan.tools import utils

print("starting")

@dataclass
class Config:
    words: list
    model_spec: dict

class ConfigManager:
    def parse_args(self, words):
        assert utils.has_cuda_capability(10, 0) and configs.torch.cuda.is_available()
        if "--fail" in words:
            sys.exit("first\\n╭─ Parsing ─╮\\n│ Unknown: │\\n│   --fail │\\n╰──╯")
        return Config(words, {"name": "flux", "model": {}})
"""


def test_the_command_runs_the_python_of_torchtitan(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("__init__", "config/__init__", "config/configs", "tools/__init__", "tools/utils"):
        path = tmp_path / "torchtitan" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(FAKE if name == "config/__init__" else "")
    monkeypatch.chdir(tmp_path)
    command = ["import", "--python", sys.executable, "out.toml", "--gpus=8", "--", "--module=llama3", "--config=a b"]
    error = cli(*command, code=2).err
    assert error.startswith('error: --module=llama3 --config=a b: model_spec.name = "flux": it generates images')
    assert f"{sys.executable} does not build the config: Unknown: --fail" in cli(*command, "--fail", code=2).err
    done = subprocess.run([sys.executable, str(DUMP), "--module", "llama3"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["words"] == ["--module", "llama3"] and "starting" in done.stderr
    command[2] = str(tmp_path / "none")
    assert "cannot be run: [Errno 2] No such file or directory" in cli(*command, code=2).err


def test_the_json_of_a_config_is_imported_and_planned(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(config()))
    output = cli("import", path, tmp_path / "recipe.toml", "--gpus", 8).out
    assert "torchtitan 0.3: 27 keys mapped, 0 not mapped and of effect" in output
    assert "planned as a run of torchtitan; " in cli("plan", path, "--gpus=8", "--json").err
