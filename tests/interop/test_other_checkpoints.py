"""Checkpoints of torchtitan and Megatron-LM: imported, exported, refused. `benchmarks.other_checkpoints` does the same with files
that these programs wrote."""

import dataclasses
import math
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from tests.checkpoints import assert_equal_state
from tests.interop.models import LLAMA
from tests.launching import SMALL, losses, python, run
from tests.training import GPT_, QWEN3, tiny
from titanlike.checkpoint.loader import read_state, read_whole
from titanlike.checkpoint.store import LocalStore
from titanlike.config import UserError
from titanlike.config.optimizer import OptimizerGroup
from titanlike.interop.weights import CheckpointWeights, open_weights
from titanlike.models.common.config import TransformerConfig
from titanlike.recipe import PretrainRecipe
from titanlike.recipe.dpo import DpoRecipe
from titanlike.tools.migration.checkpoints import export_checkpoint, import_checkpoint
from titanlike.tools.migration.dcp import DCPFolder

STEP = 3
# torch warns of what no_dist=True asks for.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def random_state(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def save(path: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def torchtitan_state(config: TransformerConfig, *, is_0_2: bool = False) -> dict[str, Any]:
    """Returns what torchtitan saves, with moments that are the weights plus 1 and 2. In 0.3, the optimizer has queries, keys and
    values as one tensor, in which the query heads of a group are followed by its key and its value."""
    weights = random_state({name: spec.shape for name, spec in config.parameters().items()})
    optimized = dict(weights)
    if not is_0_2:
        names = {name: re.sub(r"attention\.(w[qkv])", r"attention.qkv_linear.\1", name) for name in weights}
        weights = {names[name].replace("output.", "lm_head."): value for name, value in weights.items()}
        optimized = {name: value for name, value in weights.items() if "qkv_linear" not in name}
        for block in range(config.num_layers):
            prefix = f"layers.{block}.attention.qkv_linear"
            heads = [weights[f"{prefix}.{part}.weight"].view(config.num_kv_heads, -1, config.head_dim, config.dim)
                     for part in ("wq", "wk", "wv")]  # fmt: skip
            optimized[f"{prefix}.wqkv.weight"] = torch.cat(heads, dim=1).flatten(0, 2)
    optimizer: dict[str, Any] = {f"state.{name}.exp_avg": value + 1 for name, value in optimized.items()}
    optimizer |= {f"state.{name}.exp_avg_sq": value + 2 for name, value in optimized.items()}
    optimizer |= {f"state.{name}.step": torch.tensor(float(STEP)) for name in optimized}
    optimizer |= {f"param_groups.{name}.lr": 1e-3 for name in optimized}
    return weights | {
        "optimizer": optimizer,
        "train_state": {"step": STEP, "ntokens_seen": 96},
        "lr_scheduler": {"last_epoch": STEP},
    }


def imported(recipe: PretrainRecipe, step: int = STEP) -> Any:
    return read_whole(Path(recipe.run.dir, recipe.run.name, "checkpoints", f"step-{step:08d}"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two checkpoints."""
    folder: Path = tmp_path_factory.mktemp("runs")
    options = SMALL | {"training.steps": "4", "checkpoint.interval": "2", "run.name": "first"}
    done = run(folder, **options)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_run_continues_from_its_own_export(runs: Path) -> None:
    def titanlike(*words: str) -> str:
        done = python(runs, "-m", "titanlike.tools.cli.main", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    exported = titanlike("export", "runs/first", "step-2", "--step", "2", "--format", "dcp")
    assert "of step 2 for torchtitan, from runs/first/checkpoints/step-00000002" in exported
    recipe = (runs / "runs/first/recipe.toml").read_text()
    assert recipe.count('name = "first"') == 1
    (runs / "second.toml").write_text(recipe.replace('name = "first"', 'name = "second"'))
    printed = titanlike("import", "step-2", "second.toml", "--from", "torchtitan")
    assert "weights and optimizer state of step 2 of torchtitan" in printed
    done = run(runs, "second.toml")
    assert "resumed at step 2; not bit-exact: imported from torchtitan" in done.stdout, done.stderr
    first, second = (losses(runs / f"runs/{name}") for name in ("first", "second"))
    assert second == {step: loss for step, loss in first.items() if step > 2}
    states = [read_whole(runs / f"runs/{name}/checkpoints/step-00000004") for name in ("first", "second")]
    assert_equal_state(*states)
    # A second import would replace the run.
    done = python(runs, "-m", "titanlike.tools.cli.main", "import", "step-2", "second.toml")
    assert (
        done.stderr == "error: runs/second holds a run already; set run.name in the recipe to import into a new one\n"
    )
    # A run without a name has a new directory at each start.
    (runs / "unnamed.toml").write_text(recipe.replace('name = "first"', 'name = ""'))
    done = python(runs, "-m", "titanlike.tools.cli.main", "import", "step-2", "unnamed.toml")
    assert done.returncode == 2 and done.stderr.startswith("error: run.name is not set, so that `titanlike train`")
    assert not (runs / "runs/checkpoints").exists()


def test_queries_and_keys_rotate_as_in_torchtitan(tmp_path: Path) -> None:
    """Scores of attention from adjacent pairs, as complex numbers, and from halves are the same."""
    recipe = tiny(tmp_path, "imported", model=LLAMA)
    state = torchtitan_state(LLAMA)
    import_checkpoint(save(tmp_path / "step-3", state), recipe)
    found, size = imported(recipe)["model"], LLAMA.head_dim
    x, generator = torch.randn(5, LLAMA.dim), torch.arange(size // 2)
    angles = torch.arange(5)[:, None] * LLAMA.rope_theta ** (-2 * generator / size)

    def pairs(name: str) -> Tensor:
        heads = (x @ state[name].T).view(5, -1, size // 2, 2)
        return torch.view_as_real(torch.view_as_complex(heads) * torch.polar(torch.ones(()), angles)[:, None]).flatten(
            2
        )

    def halves(name: str) -> Tensor:
        a, b = (x @ found[name].T).view(5, -1, size).chunk(2, dim=-1)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    theirs = ("layers.1.attention.qkv_linear.wq.weight", "layers.1.attention.qkv_linear.wk.weight")
    ours = ("layers.1.attention.wq.weight", "layers.1.attention.wk.weight")
    groups = LLAMA.num_heads // LLAMA.num_kv_heads
    scores = []
    for rotate, names in ((pairs, theirs), (halves, ours)):
        queries, keys = (rotate(name) for name in names)
        scores.append(torch.einsum("ihd,jhd->hij", queries, keys.repeat_interleave(groups, dim=1)))
    torch.testing.assert_close(scores[0], scores[1])
    assert not torch.equal(state[theirs[0]], found[ours[0]])


@pytest.mark.parametrize(("config", "is_0_2"), [(QWEN3, False), (LLAMA, True)], ids=["qwen3, 0.3", "llama, 0.2"])
def test_a_checkpoint_of_torchtitan_returns_as_it_was(tmp_path: Path, config: TransformerConfig, is_0_2: bool) -> None:
    recipe = tiny(tmp_path, "imported", model=config)
    state, program = torchtitan_state(config, is_0_2=is_0_2), "torchtitan_0_2" if is_0_2 else "torchtitan"
    head, untied = ("output.weight" if is_0_2 else "lm_head.weight"), "tok_embeddings.weight"
    message = import_checkpoint(save(tmp_path / "step-3", state), recipe)
    assert f"weights and optimizer state of step 3 of {program}" in message
    found = imported(recipe)
    for name, value in found["model"].items():
        assert torch.equal(found["optimizer"][f"{name}.exp_avg"], value + 1), name
        assert torch.equal(found["optimizer"][f"{name}.exp_avg_sq"], value + 2), name
    weights = open_weights(tmp_path / "imported")
    assert isinstance(weights, CheckpointWeights)
    note = f"; torchtitan has one weight decay for all parameters, also norms: {recipe.optimizer.weight_decay}"
    assert export_checkpoint(weights, tmp_path / "exported", program).endswith(note) == is_0_2
    with pytest.raises(UserError, match="exported exists; choose another name"):
        export_checkpoint(weights, tmp_path / "exported", program)
    folder = DCPFolder(tmp_path / "exported")
    expected = {k: v for k, v in state.items() if isinstance(v, Tensor)}
    expected |= {f"optimizer.{k}": v for k, v in state["optimizer"].items() if isinstance(v, Tensor)}
    if config.tied_head:  # torchtitan loads both names
        expected |= {k.replace(untied, head): v for k, v in expected.items() if untied in k}
    assert folder.tensors.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(folder.read(name, (0,) * value.dim(), tuple(value.shape)), value), name
    assert folder.value("train_state.step") == folder.value("lr_scheduler.last_epoch") == STEP
    options = "optimizer.param_groups.norm.weight"
    assert folder.value(f"{options}.betas") == (recipe.optimizer.beta1, recipe.optimizer.beta2)
    assert folder.value(f"{options}.weight_decay") == (recipe.optimizer.weight_decay if is_0_2 else 0.0)
    # What any program reads with torch alone.
    loaded = {head: torch.empty(expected[head].shape)}
    dcp.load(loaded, checkpoint_id=tmp_path / "exported", no_dist=True)
    assert torch.equal(loaded[head], expected[head])


def megatron_state(config: TransformerConfig) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns what Megatron-LM saves, assembled head by head, and the parameters it consists of."""
    own = random_state({name: spec.shape for name, spec in config.parameters().items()})
    size, per_group = config.head_dim, config.num_heads // config.num_kv_heads
    ends = {"tok_embeddings": "embedding.word_embeddings", "pos_embeddings": "embedding.position_embeddings"}
    ends |= {"norm": "decoder.final_layernorm", "output": "output_layer"}
    state = {
        f"{ends[name.rpartition('.')[0]]}.{name.rpartition('.')[2]}": value
        for name, value in own.items()
        if "layers" not in name
    }
    layers: dict[str, list[Tensor]] = {}
    for index in range(config.num_layers):
        block = {
            name.removeprefix(f"layers.{index}."): value
            for name, value in own.items()
            if name.startswith(f"layers.{index}.")
        }
        for kind in ("weight", "bias") if "attention.wq.bias" in block else ("weight",):
            q, k, v = (block[f"attention.w{part}.{kind}"] for part in "qkv")
            fused = []
            for group in range(config.num_kv_heads):
                fused.append(q[group * per_group * size : (group + 1) * per_group * size])
                fused += [part[group * size : (group + 1) * size] for part in (k, v)]
            first = [
                block[f"feed_forward.{name}.{kind}"] for name in ("w1", "w3") if f"feed_forward.{name}.{kind}" in block
            ]
            tensors = {
                "self_attention.linear_qkv": torch.cat(fused), "self_attention.linear_proj": block[f"attention.wo.{kind}"],
                "mlp.linear_fc1": torch.cat(first), "mlp.linear_fc2": block[f"feed_forward.w2.{kind}"],
            }  # fmt: skip
            for name, value in tensors.items():
                layers.setdefault(f"{name}.{kind}", []).append(value)
            for name, norm in (("self_attention.linear_qkv", "attention_norm"), ("mlp.linear_fc1", "ffn_norm")):
                layers.setdefault(f"{name}.layer_norm_{kind}", []).append(block[f"{norm}.{kind}"])
    return state | {f"decoder.layers.{name}": torch.stack(values) for name, values in layers.items()}, own


@pytest.mark.parametrize("config", [LLAMA, GPT_], ids=["llama", "gpt"])
def test_a_checkpoint_of_megatron_is_imported(tmp_path: Path, config: TransformerConfig) -> None:
    recipe = tiny(tmp_path, "imported", model=config)
    state, own = megatron_state(config)
    optimizer = {
        f"optimizer.state.{kind}.{name}": value + number
        for name, value in state.items()
        for number, kind in ((1, "exp_avg"), (2, "exp_avg_sq"), (3, "fp32_param"))
    }
    low = {name: value.bfloat16() for name, value in state.items()}
    source = save(tmp_path / "iter_0000003", low | optimizer)
    message = import_checkpoint(source, recipe)
    assert "weights and optimizer state of step 3 of megatron" in message
    found = imported(recipe)
    # The weights are those of the optimizer, which has them in float32.
    # Without the name of the folder, the step is not known.
    (tmp_path / "iter_0000003").rename(tmp_path / "last")
    assert "Megatron-LM has it in the name" in import_checkpoint(tmp_path / "last", tiny(tmp_path, "0", model=config))
    assert_equal_state(found, {"model": {name: value + 3 for name, value in own.items()}})
    for name, value in own.items():
        assert torch.equal(found["optimizer"][f"{name}.exp_avg"], value + 1)
        assert torch.equal(found["optimizer"][f"{name}.exp_avg_sq"], value + 2)
        assert found["optimizer"][f"{name}.step"] == STEP


def test_weights_alone_are_the_checkpoint_of_step_0(tmp_path: Path) -> None:
    state = torchtitan_state(LLAMA)
    del state["optimizer"]
    source = save(tmp_path / "step-3", state)
    recipe = tiny(tmp_path, "one", model=LLAMA)
    assert "weights (it has no optimizer state: the run starts at step 1)" in import_checkpoint(source, recipe)
    assert imported(recipe, 0)["optimizer"] == {}
    save(tmp_path / "full", torchtitan_state(LLAMA))
    changes: dict[str, dict[str, Any]] = {
        "the recipe's optimizer state has low precision": dict(optimizer=dict(state_dtype="bfloat16")),
        "optimizer.groups has another optimizer": dict(
            optimizer=dict(groups=(OptimizerGroup(pattern="layers", optimizer="muon"),))
        ),
        "data.source = 'stream' has no position at a step": dict(data=dict(source="stream", path=str(tmp_path))),
    }
    for number, (why, sections) in enumerate(changes.items()):
        assert why in import_checkpoint(tmp_path / "full", tiny(tmp_path, str(number), model=LLAMA, **sections))
    recipe = tiny(tmp_path, "asked", model=LLAMA)
    assert "--weights-only is set" in import_checkpoint(tmp_path / "full", recipe, weights_only=True)
    assert read_state(LocalStore(tmp_path / "asked/checkpoints"), 0).imported == "torchtitan"


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    state = torchtitan_state(LLAMA)
    source = save(tmp_path / "step-3", state)

    def message(recipe: PretrainRecipe, path: Path = source) -> str:
        with pytest.raises(UserError) as error:
            import_checkpoint(path, recipe)
        assert not Path(recipe.run.dir, recipe.run.name).exists()
        return str(error.value)

    def other(**fields: Any) -> PretrainRecipe:
        return tiny(tmp_path, "refused", model=dataclasses.replace(LLAMA, **fields))

    layers = LLAMA.num_layers
    assert f"also has layers.{layers - 1}.attention.qkv_linear.wk.weight" in message(other(num_layers=layers - 1))
    assert f"lacks layers.{layers}.attention.qkv_linear.wk.weight" in message(other(num_layers=layers + 1))
    assert "layers.0.feed_forward.w1.weight has shape (" in message(other(ffn_dim=LLAMA.ffn_dim + 32))
    assert message(tiny(tmp_path, "refused", model=LLAMA, training=dict(steps=3))).endswith(
        "step-3 is of step 3, but training.steps = 3; set it to the steps in total"
    )
    assert "it has no .metadata; choose one of the checkpoints in it: step-3" in message(other(), tmp_path)
    missing = {name: value for name, value in state.items() if name != "norm.weight"}
    assert "lacks norm.weight" in message(other(), save(tmp_path / "missing", missing))
    del state["optimizer"]["state.norm.weight.exp_avg"]
    partial = tiny(tmp_path, "partial", model=LLAMA)
    assert "it lacks the optimizer state optimizer.state.norm.weight.exp_avg" in import_checkpoint(
        save(tmp_path / "part", state), partial
    )


def test_a_head_that_differs_from_the_embedding_is_not_tied(tmp_path: Path) -> None:
    state = torchtitan_state(QWEN3)
    state["lm_head.weight"] = state["tok_embeddings.weight"].clone()
    assert "weights and optimizer" in import_checkpoint(
        save(tmp_path / "same", state), tiny(tmp_path, "same", model=QWEN3)
    )
    state["lm_head.weight"][-1, -1] += 1
    with pytest.raises(UserError, match=r"lm_head.weight of .* differs from tok_embeddings.weight"):
        import_checkpoint(save(tmp_path / "other", state), tiny(tmp_path, "refused", model=QWEN3))


def test_a_run_with_a_reference_model_starts_from_checkpoint_initial(tmp_path: Path) -> None:
    source = save(tmp_path / "step-3", torchtitan_state(LLAMA))
    with pytest.raises(UserError, match=r"the reference model is checkpoint.initial"):
        import_checkpoint(source, DpoRecipe(model=LLAMA))


class Malicious:
    def __reduce__(self) -> Any:
        return print, ("executed",)


def test_nothing_in_a_checkpoint_is_executed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(tmp_path / "bytes", {"train_state": {"step": Malicious()}})
    with pytest.raises(UserError, match=r"train_state.step cannot be read: "):
        DCPFolder(folder).value("train_state.step")
    (folder / ".metadata").write_bytes(pickle.dumps(Malicious()))
    with pytest.raises(UserError, match=r"it contains builtins.print, which is not loaded"):
        DCPFolder(folder)
    for content in (b"", b"\x80\x04K\x01."):
        (folder / ".metadata").write_bytes(content)
        with pytest.raises(UserError, match=r"\.metadata"):
            DCPFolder(folder)
    assert "executed" not in capsys.readouterr().out


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path / "damaged", {"a": torch.ones(2), "b": torch.ones(3, 4)})
    [file] = folder.glob("*.distcp")
    file.write_bytes(file.read_bytes()[: math.floor(file.stat().st_size / 2)])
    with pytest.raises(UserError, match="damaged: b cannot be read"):
        DCPFolder(folder).read("b", (0, 0), (3, 4))
