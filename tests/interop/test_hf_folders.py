"""Damaged and unsupported folders, interrupted exports, and memory."""

import json
import os
import re
import shutil
import struct
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.durability import Disk
from tests.interop.models import CONFIGS, LLAMA, PUBLISHED, export_model, model_of
from titanlike.checkpoint.format import ShardRange
from titanlike.config import UserError
from titanlike.interop import export as export_module
from titanlike.interop import weights as weights_module
from titanlike.interop.export import export
from titanlike.interop.hf_parameters import whole
from titanlike.interop.weights import Weights, open_weights
from titanlike.models.families import all_configs
from titanlike.models.moe.config import Qwen3MoeConfig


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_model(model_of(LLAMA), LLAMA, tmp_path_factory.mktemp("folder") / "hf", shard_size=100_000)


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path / "hf")
    return tmp_path / "hf"


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def config(**changes: object) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "config.json", **changes)


def index(change: Callable[[dict[str, str]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / "model.safetensors.index.json"
        values = json.loads(file.read_text())
        change(values["weight_map"])
        file.write_text(json.dumps(values))

    return apply


def header(change: Callable[[dict[str, dict[str, object]]], object]) -> Callable[[Path], None]:
    """Edits the header of the first file of weights, whose size it keeps."""

    def apply(folder: Path) -> None:
        file = sorted(folder.glob("*.safetensors"))[0]
        content = file.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        values = json.loads(content[8 : 8 + length])
        change(values)
        text = json.dumps(values, separators=(",", ":")).encode().ljust(length)
        file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])

    return apply


def truncate(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-4])


UNUSED = "model.layers.0.self_attn.rotary_emb.inv_freq"
EMPTY: dict[str, object] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}


WRONG_VALUE = "config.json: a value that this architecture needs is null, 0 or of another type; download the file again"
EMBEDDING = "model.embed_tokens.weight"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing file": (lambda f: sorted(f.glob("*.safetensors"))[1].unlink(), "lacks model-00002-of"),
    "truncated file": (truncate, "bytes, but the file has"),
    "lying offsets": (header(lambda h: h[EMBEDDING].update(data_offsets=[0, 8])), "another number of bytes than its shape"),
    "other shape": (header(lambda h: h[EMBEDDING].update(shape=[64, 301])), "has shape (64, 301), but config.json"),
    "unknown dtype": (header(lambda h: h[EMBEDDING].update(dtype="F4")), "has the dtype F4, which is not supported"),
    "missing tensor": (header(lambda h: h.update({UNUSED: h.pop(EMBEDDING)})), f"lacks {EMBEDDING}; it is not a llama model"),
    "another tensor": (header(lambda h: h.update({"model.x": EMPTY})), "also has model.x; it is not a llama"),
    "path in the index": (index(lambda m: m.update(x="../secret.safetensors")), "is not the name of a file in the folder"),
    "no index": (lambda f: (f / "model.safetensors.index.json").unlink(), "has no model.safetensors and no"),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), "is not valid JSON"),
    "architecture": (config(architectures=["MambaForCausalLM"]), "choose a model of BertForMaskedLM, DeepseekV2ForCausalLM,"),
    "quantized": (config(quantization_config={"bits": 4}), '= {{"bits": 4}} is neither MXFP4 nor float8 with'),
    "zero heads": (config(num_attention_heads=0), WRONG_VALUE),
    "negative size": (config(vocab_size=-1), "config.json: vocab_size: Input should be greater than or equal to 1; correct it"),
    "RoPE theta": (config(rope_parameters={"rope_theta": []}), "rope_theta = 500000.0, but transformers reads rope_theta = [];"),
    "tied text": (config(tie_word_embeddings="false"), "config.json: tied_head: Input should be a valid boolean; correct it"),
    "too many layers": (config(num_hidden_layers=10**12), "num_hidden_layers = 1000000000000 is more than 10,000; download"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=list(DAMAGE))
def test_damaged_and_unsupported_folders_are_refused(
    folder: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(folder)
    with pytest.raises(UserError) as error:
        open_weights(folder)
    assert message.format(folder=folder) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_those_of_their_sizes(name: str) -> None:
    """Whatever the weights beside them are quantized in."""
    size, parameters, values = PUBLISHED[name].values()
    [kind] = (each for each in all_configs() if each.hf_architecture == values["architectures"][0])
    found = kind.from_hugging_face(values)
    assert found == kind(**{"size": size, **kind.sizes[size]})
    assert found.num_parameters() == parameters
    assert kind.from_hugging_face(found.to_hugging_face()) == found


def test_the_keys_of_published_configs_with_experts_are_exported() -> None:
    for name in ("Qwen3 30B-A3B", "Mixtral 8x7B"):
        values = PUBLISHED[name]["config"]
        [kind] = (each for each in all_configs() if each.hf_architecture == values["architectures"][0])
        found: Any = kind.from_hugging_face(values)
        written = replace(found, balance_loss=values["router_aux_loss_coef"]).to_hugging_face()
        # An export also has the ids of special tokens, which depend on the tokenizer.
        unused = {"bos_token_id", "eos_token_id", "max_window_layers"}
        assert {key for key, value in values.items() if (key, written.get(key)) != (key, value)} <= unused
    options = dict(num_shared_experts=1, router_score="sigmoid", router_scale=2.5, balance_bias_rate=0.001)
    for name, value in options.items():
        message = f"model.{name} = {value!r} has no equivalent in Qwen3MoeForCausalLM; it cannot be exported"
        with pytest.raises(UserError, match=re.escape(message)):
            Qwen3MoeConfig(**{name: value}).to_hugging_face()


@pytest.mark.parametrize("name", ["tied", "GPT-2", "Gemma 2"])
def test_an_lm_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_module, "CHUNK_SIZE", 64 * 7)  # several parts, the last one shorter
    folder = export_model(model_of(CONFIGS[name]), CONFIGS[name], tmp_path / "hf")
    [file] = folder.glob("*.safetensors")
    tensors = safetensors.torch.load_file(file)
    [embedding] = [name for name in tensors if name.endswith(("embed_tokens.weight", "wte.weight"))]
    for change in (None, 0, 150, 300):  # a row
        head = tensors[embedding].clone()
        if change is not None:
            head[change, 5] += 1e-3
        safetensors.torch.save_file(tensors | {"lm_head.weight": head}, file, {"format": "pt"})
        ranks = [(rank, 3) for rank in range(3)]
        refused = 0
        for share in [(0, 1), *ranks]:
            try:
                open_weights(folder, verify_share=share)
            except UserError as error:
                refused += 1
                assert f"ties the LM head to the embedding, but lm_head.weight differs from {embedding}" in str(error)
        assert refused == (0 if change is None else 2), "one rank of three finds it"
    safetensors.torch.save_file(tensors | {"lm_head.weight": tensors[embedding][1:].clone()}, file, {"format": "pt"})
    with pytest.raises(UserError, match="ties the LM head to the embedding"):
        open_weights(folder)


def test_pickles_are_not_read(folder: Path) -> None:
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UserError, match=r"pytorch_model.bin is a pickle, which can run code"):
        open_weights(folder)


def test_names_without_the_prefix_of_the_head_and_computed_buffers_are_accepted(tmp_path: Path) -> None:
    """As in the published folder of GPT-2."""
    config = CONFIGS["GPT-2"]
    export_model(model_of(config), config, tmp_path / "hf")
    [file] = (tmp_path / "hf").glob("*.safetensors")
    tensors = safetensors.torch.load_file(file)
    tensors = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    computed = ("bias", "masked_bias", "rotary_emb.inv_freq")
    tensors |= {f"h.0.attn.{name}": tensors["wpe.weight"].clone() for name in computed}
    safetensors.torch.save_file(tensors, tmp_path / "hf/model.safetensors", {"format": "pt"})
    (tmp_path / "hf/model.safetensors.index.json").unlink()
    weights = open_weights(tmp_path / "hf")
    query = weights.read("layers.1.attention.wq.weight", whole((64, 64)))
    assert query.equal(tensors["h.1.attn.c_attn.weight"][:, :64].t())


def test_an_export_appears_whole_or_not_at_all(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Disk
) -> None:
    (tmp_path / "whole.partial/hf").mkdir(parents=True)  # of an export that was killed
    export(open_weights(folder), tmp_path / "whole")
    disk.assert_published(tmp_path / "whole")
    shutil.rmtree(tmp_path / "whole")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/file").write_text("mine")
    with pytest.raises(UserError, match="exists; choose another name"):
        export(open_weights(folder), tmp_path / "kept")
    assert (tmp_path / "kept/file").read_text() == "mine"

    def full_disk(*args: object) -> None:
        raise OSError(28, os.strerror(28))

    for failure, message in ((full_disk, "cannot be written: No space left"), (KeyboardInterrupt, None)):
        raised = failure if message else lambda *args: (_ for _ in ()).throw(KeyboardInterrupt)
        monkeypatch.setattr(export_module, "write_tensors", raised)
        with pytest.raises(UserError if message else KeyboardInterrupt, match=message):
            export(open_weights(folder), tmp_path / "out")
        with pytest.raises(UserError if message else KeyboardInterrupt, match=message):
            export(open_weights(folder), tmp_path / "kept", replace=True)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "kept"]
        assert (tmp_path / "kept/file").read_text() == "mine"


def test_an_export_holds_few_tensors_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a checkpoint or a folder that is larger than the memory."""
    config, alive, peaks = replace(LLAMA, num_layers=12), weakref.WeakSet[Any](), list[int]()
    original = Weights.read

    def read(weights: Weights, name: str, shard_range: ShardRange) -> torch.Tensor:
        tensor = original(weights, name, shard_range)
        alive.add(tensor)
        peaks.append(sum(each.nbytes for each in alive))
        return tensor

    monkeypatch.setattr(Weights, "read", read)
    export_model(model_of(config), config, tmp_path / "hf")
    export(open_weights(tmp_path / "hf"), tmp_path / "again", dtype="bfloat16")
    assert len(peaks) == 2 * len(config.parameters())
    assert max(peaks) < config.num_parameters()  # bytes: a quarter of the weights in float32
