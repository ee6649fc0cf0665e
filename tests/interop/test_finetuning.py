"""Fine-tuning: the first loss is that of transformers, and exports hold the result of LoRA."""

import dataclasses
import io
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
from tokenizers import AddedToken
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.interop.models import CONFIGS, export_model, model_of
from tests.launching import ROOT, SMALL, Cli, run
from tests.pool import Ranks
from tests.programs import blocks
from tests.training import build, full_tensor, result, tiny, train
from titanlike.config import UserError
from titanlike.config.finetune import ChatData, Lora
from titanlike.config.sections import Float8, Parallelism, Tokenizer
from titanlike.data.batches.chats import open_sources
from titanlike.data.tokens.chat_template import build_chat_template
from titanlike.data.tokens.tokenizer import build_tokenizer
from titanlike.interop.export import export
from titanlike.interop.generation_config import stop_tokens
from titanlike.interop.tokenizer_files import tokenizer_files
from titanlike.interop.weights import CheckpointWeights, load_weights, open_weights
from titanlike.models.common.lora import apply_lora
from titanlike.models.registry import build_model
from titanlike.parallelisms.mixed_precision import cast_parameters
from titanlike.run.checks import check_recipe
from titanlike.tools.adapter import export_adapter
from titanlike.utils.dtensor import local_tensor

pytestmark = pytest.mark.filterwarnings("default")  # those of transformers are not ours

SEQ_LEN = 128
LAYOUTS = {"one process": (1, Parallelism()), "TP-FSDP": (4, Parallelism(tensor=2)), "PP": (2, Parallelism(pipeline=2))}


@pytest.fixture(
    scope="module",
    params=["grouped-query", *(pytest.param(name, marks=pytest.mark.slow) for name in ("GPT-2", "Qwen3-MoE"))],
)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model in a Hugging Face folder with a chat template, and a file of conversations beside it."""
    folder = tmp_path_factory.mktemp("base")
    config = dataclasses.replace(CONFIGS[request.param], vocab_size=304)
    export_model(model_of(config), config, folder / "hf")
    (folder / "hf/chat_template.jinja").write_text(build_chat_template("", build_tokenizer(Tokenizer())).source)
    with (folder / "chats.jsonl").open("w") as file:
        for first in range(40):
            turns = [
                ("user", f"{first}?"),
                ("assistant", "é" * (1 + first % 7)),
                ("user", "more"),
                ("assistant", "so" * (1 + first)),
            ]
            messages = [{"role": role, "content": content} for role, content in turns]
            file.write(json.dumps({"messages": messages[: 2 + 2 * (first % 2)]}) + "\n")
    return config, folder


def recipe(folder: Path, name: str, base: tuple[Any, Path], **sections: Any) -> Any:
    config, source = base
    training = dict(steps=1, seq_len=SEQ_LEN, global_batch_size=8, local_batch_size=2)
    sections["training"] = training | sections.get("training", {})
    return tiny(
        folder, name, model=config, data=ChatData(source="chat", path=str(source / "chats.jsonl"), holdout_every=0),
        tokenizer=Tokenizer(encoding=str(source / "hf")), checkpoint=dict(initial=str(source / "hf")),
        schedule=dict(warmup_steps=0, decay="none"), validation=dict(interval=0), **sections,
    )  # fmt: skip


@torch.no_grad()
def loss_of_transformers(base: tuple[Any, Path]) -> float:
    """Returns the loss of the first batch, which transformers computes for one conversation at a time."""
    _, folder = base
    section = recipe(folder, "reference", base)
    tokenizer = build_tokenizer(section.tokenizer)
    batch = open_sources(
        section.data, tokenizer, seq_len=SEQ_LEN, global_batch_size=8, seed=0, validate=False
    ).training.read(1, range(8))
    reference = AutoTokenizer.from_pretrained(folder / "hf")
    model = AutoModelForCausalLM.from_pretrained(folder / "hf")
    encoded = {}
    for line in (folder / "chats.jsonl").read_text().splitlines():
        found = reference.apply_chat_template(
            json.loads(line)["messages"], return_assistant_tokens_mask=True, return_dict=True
        )
        encoded[tuple(found["input_ids"])] = found["assistant_masks"]
    total, count, num_chats = 0.0, 0, 0
    assert batch.document_ids is not None
    for row, documents in zip(batch.tokens, batch.document_ids, strict=True):
        for document in range(documents[-1] + 1):
            ids = tuple(row[documents == document].tolist())
            if ids not in encoded:
                assert set(ids) == {tokenizer.eos}, "only padding is not a conversation"
                continue
            labels = torch.tensor(
                [token if is_label else -100 for token, is_label in zip(ids, encoded[ids], strict=True)]
            )
            logits = model(torch.tensor([ids])).logits[0]
            total += float(cross_entropy(logits[:-1], labels[1:], reduction="sum"))
            count += int((labels[1:] != -100).sum())
            num_chats += 1
    assert num_chats > 8, "several conversations in a sequence"
    return total / count


@pytest.mark.parametrize("layout", ["one process", "PP", pytest.param("TP-FSDP", marks=pytest.mark.slow)])
def test_fine_tuning_starts_at_the_loss_of_transformers(ranks: Ranks, tmp_path: Path, base: Any, layout: str) -> None:
    expected = loss_of_transformers(base)
    world_size, parallelism = LAYOUTS[layout]
    for lora in (Lora(), Lora(rank=4)):
        found = train(ranks(world_size), recipe(tmp_path, f"rank{lora.rank}", base, parallelism=parallelism, lora=lora))
        assert found.losses[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("world_size", [1, 2], ids=["one process", "FSDP"])
def test_frozen_weights_in_the_compute_dtype_give_equal_results(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    section = tiny(tmp_path, "", lora=Lora(rank=4), training=dict(compute_dtype="bfloat16"))
    found, expected = (ranks(world_size).run(_lora_step, section, frozen)[0] for frozen in ("compute", "master"))
    trained = {name for name in found["dtypes"] if "lora_" in name}
    assert {found["dtypes"][name] for name in trained} == {torch.float32}
    assert {found["dtypes"][name] for name in found["dtypes"].keys() - trained} == {torch.bfloat16}
    assert set(expected["dtypes"].values()) == {torch.float32}
    assert found["gradients"].keys() == trained
    assert torch.equal(found["loss"], expected["loss"])
    # Of float8 all-gather, which casts frozen weights from the precision of the master weights.
    float8 = Float8(scaling="tensorwise", layers=("*",), emulate=True, all_gather=True)
    gathered = ranks(world_size).run(_lora_step, dataclasses.replace(section, float8=float8), "compute")[0]
    assert set(gathered["dtypes"].values()) == {torch.float32}
    for name, gradient in found["gradients"].items():
        assert torch.equal(gradient, expected["gradients"][name]), name


def _lora_step(section: Any, frozen: str) -> dict[str, Any]:
    def cast_all(model: Any, dtype: torch.dtype, frozen_dtype: torch.dtype) -> None:
        cast_parameters(model, dtype, frozen_dtype if frozen == "compute" else dtype)

    with mock.patch("titanlike.parallelize.cast_parameters", cast_all):
        model, _ = build(section)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):  # otherwise A has no gradient
                local_tensor(parameter).fill_(0.1)
    tokens = torch.arange(32).view(2, 16) % section.model.vocab_size
    loss = model(tokens=tokens, labels=tokens.roll(-1, 1))
    loss.backward()
    parameters = dict(model.named_parameters())
    return {
        "loss": loss.detach(),
        "dtypes": {name: parameter.dtype for name, parameter in parameters.items()},
        "gradients": {name: full_tensor(p.grad) for name, p in parameters.items() if p.grad is not None},
    }


def test_an_export_keeps_the_precision_of_loras_matrices(ranks: Ranks, tmp_path: Path, base: Any) -> None:
    config, _ = base
    tuned = recipe(
        tmp_path, "run", base, lora=Lora(rank=4, layers=("wq",)), training=dict(compute_dtype="bfloat16"), optimizer=dict(lr=1e-3)
    )  # fmt: skip
    train(ranks(1), tuned)
    state = result(tuned).state["model"]
    layer = "layers.0.attention.wq"
    assert state[f"{layer}.weight"].dtype == torch.bfloat16 and state[f"{layer}.lora_B"].abs().max() > 0
    export(open_weights(tmp_path / "run"), tmp_path / "merged")
    merged = build_model(config)
    load_weights(merged, open_weights(tmp_path / "merged"))
    added = 16.0 / 4 * state[f"{layer}.lora_B"] @ state[f"{layer}.lora_A"]
    torch.testing.assert_close(
        merged.get_parameter(f"{layer}.weight").detach(), state[f"{layer}.weight"].float() + added
    )
    assert open_weights(tmp_path / "merged").dtype(f"{layer}.weight") == torch.float32


def test_exports_hold_what_lora_has_learnt(ranks: Ranks, tmp_path: Path, base: Any) -> None:
    config, folder = base
    layers = ("attention.wo", "layers.1.feed_forward")
    section = Lora(rank=4, alpha=8.0, layers=layers)
    tuned = recipe(
        tmp_path,
        "run",
        base,
        lora=section,
        training=dict(steps=3),
        optimizer=dict(lr=3e-2),
        parallelism=Parallelism(tensor=2),
    )
    train(ranks(2), tuned)
    weights = open_weights(tmp_path / "run")
    assert isinstance(weights, CheckpointWeights)
    # Base and adapters, computed by the model.
    model = build_model(config)
    apply_lora(model, model.get_submodule("layers"), section)  # type: ignore[arg-type]
    names = {name for name, _ in model.named_parameters() if name.endswith("lora_A")}
    assert {f"{layer}.lora_A" for layer in weights.adapted_layers} == names
    assert names < {f"layers.{index}.{name}.lora_A" for index in range(3) for name in config.block_matrices()}
    state = result(tuned).state["model"]
    for name, value in model_of(config).named_parameters():
        assert torch.equal(state[name], value), f"{name} is frozen"
    model.load_state_dict(state)
    tokens = torch.randint(0, 300, (2, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(tokens=tokens)
        export(weights, tmp_path / "merged")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        difference = (merged(tokens).logits - expected).abs().max() / expected.abs().max()
        unchanged = AutoModelForCausalLM.from_pretrained(folder / "hf")(tokens).logits
    assert difference < 1e-5
    assert (unchanged - expected).abs().max() / expected.abs().max() > 1e-3
    assert (tmp_path / "merged/chat_template.jinja").read_text() == (folder / "hf/chat_template.jinja").read_text()
    # A run that starts from this one, merged too.
    again = build_model(config)
    load_weights(again, weights)
    with torch.no_grad():
        torch.testing.assert_close(again(tokens=tokens), expected, rtol=1e-4, atol=1e-4)
    # And under a layout with shards of rows and of columns.
    sharded = tiny(tmp_path, "", model=config, parallelism=Parallelism(tensor=2))
    for loaded in ranks(4).run(_loaded, sharded, tmp_path / "run"):
        for name, value in again.named_parameters():
            torch.testing.assert_close(loaded[name], value, msg=lambda text, name=name: f"{name}: {text}")

    export_adapter(weights, tmp_path / "adapter")
    settings = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["base_model_name_or_path"]) == (4, 8.0, str(folder / "hf"))
    matrices = safetensors.torch.load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert len(matrices) == 2 * len(settings["target_modules"]) == 2 * len(names)
    adapted = AutoModelForCausalLM.from_pretrained(folder / "hf")
    with torch.no_grad():
        for name in settings["target_modules"]:
            first, second = (matrices[f"base_model.model.{name}.lora_{matrix}.weight"] for matrix in "AB")
            product = 8.0 / 4 * second @ first
            adapted.get_parameter(f"{name}.weight").add_(product.t() if settings["fan_in_fan_out"] else product)
        assert (adapted(tokens).logits - expected).abs().max() / expected.abs().max() < 1e-5
    with pytest.raises(UserError, match=r"adapter exists; choose another name"):
        export_adapter(weights, tmp_path / "adapter")


def _loaded(section: Any, path: Path) -> dict[str, torch.Tensor]:
    model, _ = build(section)
    load_weights(model, open_weights(path))
    return {name: full_tensor(parameter) for name, parameter in model.named_parameters()}


def test_an_exported_chat_model_stops_at_its_end_of_turn(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    for name, content in tokenizer_files(build_tokenizer(Tokenizer()), 64).items():
        (base / name).write_bytes(content)
    reference = AutoTokenizer.from_pretrained(base)
    reference.add_tokens([AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>")])
    reference.save_pretrained(base)
    end_of_document, end_of_turn = reference.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    source = {"bos_token_id": None, "eos_token_id": [0, end_of_document], "temperature": 0.6, "do_sample": True}
    (base / "generation_config.json").write_text(json.dumps(source))
    question, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [question, answer]}) + "\n")
    train(ranks(1), tiny(
        tmp_path, "run", data=ChatData(source="chat", path=str(tmp_path / "chats.jsonl"), holdout_every=0),
        tokenizer=Tokenizer(encoding=str(base)), training=dict(steps=40, global_batch_size=1, seq_len=64),
        optimizer=dict(lr=1e-2), schedule=dict(warmup_steps=0), validation=dict(interval=0),
    ))  # fmt: skip
    weights = open_weights(tmp_path / "run")
    export(weights, tmp_path / "hf")
    written = json.loads((tmp_path / "hf/generation_config.json").read_text())
    assert written == source | {"eos_token_id": [0, end_of_document, end_of_turn]}
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (None, written["eos_token_id"])
    assert config["dtype"] == config["torch_dtype"] == "float32"
    assert "bos_token" not in json.loads((tmp_path / "hf/tokenizer_config.json").read_text())
    # A model of an export that is exported again has the same files.
    export(open_weights(tmp_path / "hf"), tmp_path / "again")
    assert json.loads((tmp_path / "again/generation_config.json").read_text()) == written

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    prompt = tokenizer.apply_chat_template(
        [question], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    found = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(found) == "yes<|im_end|>"
    assert stop_tokens(weights, build_tokenizer(weights.tokenizer)) == {0, end_of_document, end_of_turn}
    monkeypatch.setenv("NPROC", "1")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    for path in ("run", "hf"):
        printed = cli("generate", tmp_path / path, "--chat", "--prompt", question["content"], "--temperature=0")
        assert (printed.out, printed.err) == ("yes\n", "")


@pytest.mark.slow
def test_the_commands_of_the_documentation_run(tmp_path: Path) -> None:
    """With a tiny model and few steps."""
    keys = {key: value for key, value in SMALL.items() if key not in ("data.source", "training.seq_len")}
    keys |= {"training.steps": "3", "training.seq_len": "64", "checkpoint.export": "float32"}
    (block,) = [block for block in blocks(ROOT / "docs/post_training.md") if "--run.name=sums_lora" in block]
    commands = [line.split() for line in block.splitlines() if line.startswith("./run_train.sh train_configs/")]
    assert len(commands) == 3
    for _, recipe, *options in commands:
        named = dict(option.removeprefix("--").split("=", 1) for option in options)
        done = run(tmp_path, str(ROOT / recipe), **{**keys, **named})
        assert done.returncode == 0, done.stderr
        assert ("starting from the weights of runs/base" in done.stdout) == (named["run.name"] != "base")
        assert ("titanlike generate runs/base --prompt TEXT" in done.stdout) == (named["run.name"] == "base")
        assert (f"titanlike generate runs/{named['run.name']} --chat" in done.stdout) == (named["run.name"] != "base")
        assert ("lora    rank 8" in done.stdout) == (named["run.name"] == "sums_lora")
    reference = AutoTokenizer.from_pretrained(tmp_path / "runs/sums_lora/hf")
    chat = [{"role": "user", "content": "What is 3 plus 4?"}]
    assert reference.apply_chat_template(chat, tokenize=False) == "user\nWhat is 3 plus 4?<|endoftext|>"
    assert export_adapter(open_weights(tmp_path / "runs/sums_lora"), tmp_path / "adapter") > 0


def test_adapters_that_peft_does_not_have_are_refused(ranks: Ranks, tmp_path: Path, base: Any) -> None:
    config, folder = base
    with pytest.raises(UserError, match=r"has no LoRA adapters; omit --adapter"):
        export_adapter(open_weights(folder / "hf"), tmp_path / "adapter")
    if config.name == "gpt":
        train(ranks(1), recipe(tmp_path, "run", base, lora=Lora(rank=2, layers=("wq",))))
        with pytest.raises(UserError, match=r"attention.wq is a part of a larger matrix in GPT2LMHeadModel"):
            export_adapter(open_weights(tmp_path / "run"), tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (dict(lora=Lora(rank=2, layers=("wx", "wq"))), r"^lora.layers: 'wx' matches no linear layer \(attention.wq, "),
        (
            dict(lora=Lora(rank=2, layers=("layers.0",)), parallelism=Parallelism(pipeline=2)),
            r"lora.layers selects nothing in blocks \d to 1, which are stage 1 of the pipeline; select layers of all",
        ),
    ],
)  # fmt: skip
def test_lora_sections_that_are_refused(sections: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        check_recipe(tiny(tmp_path, "run", **sections), 2)
