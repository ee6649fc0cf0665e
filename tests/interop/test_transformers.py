"""Exported folders as transformers reads them, and folders that transformers writes. `.ci/run` repeats this with transformers 4."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tokenizers
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, __version__

from tests.interop import models
from tests.interop.models import ENCODERS, GPT_OSS, LLAMA, T5, assert_equal_weights, export_model, model_of
from tests.interop.reference import difference, exported, inputs_of, labels_of, load
from titanlike.checkpoint.format import ShardRange
from titanlike.config import UserError
from titanlike.config.sections import Tokenizer
from titanlike.data.tokens.tokenizer import build_tokenizer
from titanlike.interop.export import export
from titanlike.interop.hf_parameters import whole
from titanlike.interop.tokenizer_files import adds_bos_and_eos, tokenizer_files
from titanlike.interop.weights import load_weights, open_weights
from titanlike.losses import IGNORE
from titanlike.models.common.config import TransformerConfig
from titanlike.models.common.experts import routers
from titanlike.models.registry import build_model
from titanlike.parallelisms.mesh import build_mesh
from titanlike.tools.data.train_tokenizer import train
from titanlike.tools.inference.load import load_for_generation

pytestmark = pytest.mark.filterwarnings("default")  # those of transformers are not ours
# transformers 4 lacks the scale of YaRN in DeepSeek-V2, and its V3 selects masked experts where all scores are negative.
CONFIGS = {
    name: config
    for name, config in (models.CONFIGS | ENCODERS | {"T5": T5}).items()
    if not (__version__.startswith("4.") and name.startswith("DeepSeek"))
}
NASTY = "Héllo  wörld\n\n\t 12345678 '' ''s I'LL don't 漢字 \U0001f600\u200d\U0001f525 \0 \ufeff e\u0301 \r\n a\u00a0b _x_  "


def config_of(name: str) -> Any:
    if name not in CONFIGS:
        pytest.skip("transformers 4 computes DeepSeek in another way")
    return CONFIGS[name]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_logits_equal_those_of_transformers(config: TransformerConfig, tmp_path: Path) -> None:
    model = model_of(config)
    reference = exported(model, config, tmp_path / "hf")
    # Rotary angles are in float32 in both: in float64, ModernBERT still differs by 4e-6.
    assert difference(model, reference, config) < (1e-5 if config.causal else 2e-5)
    sizes = {
        value.data_ptr(): value.numel() for value in reference.state_dict().values()
    }  # tied weights are twice in it
    assert sum(sizes.values()) == config.num_parameters()
    reference.save_pretrained(tmp_path / "saved")
    assert_equal_weights(tmp_path / "saved", model, config)


@pytest.mark.parametrize("name", ["Qwen3-MoE", "Mixtral"])
def test_gradients_with_the_balance_loss_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Of three blocks, which transformers pools, and of the mean over two sequences."""
    config = dataclasses.replace(CONFIGS[name], balance_loss=0.5)  # type: ignore[call-arg]
    model = model_of(config)
    reference = exported(model, config, tmp_path / "hf")
    tokens = inputs_of(config)[0]["tokens"][:, :64]
    labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=IGNORE)
    auxiliary = 0.0
    for sequence in tokens[:, None]:
        out = reference(sequence, labels=sequence, output_router_logits=True)
        auxiliary += 0.5 * float(out.aux_loss.detach()) / 2
        (out.loss / 2).backward()
    loss = model(tokens, labels=labels) / (labels != IGNORE).sum()
    loss.backward()
    assert auxiliary > 0.5, "the balance loss takes part"
    expected = [parameter for key, parameter in reference.named_parameters() if key.endswith(".gate.weight")]
    found = [router.weight for router in routers(model)]
    pairs = zip([*found, model.tok_embeddings.weight], [*expected, reference.model.embed_tokens.weight], strict=True)
    for one, other in pairs:
        assert float((one.grad - other.grad).abs().max() / other.grad.abs().max()) < 5e-5


@pytest.mark.parametrize("name", ["DeepSeek-V2", "DeepSeek-V3", "GPT-OSS", *ENCODERS, "T5"])
def test_gradients_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    config = config_of(name)
    model = model_of(config)
    reference = exported(model, config, tmp_path / "hf")
    inputs, theirs = ({key: value[:, :64] for key, value in each.items()} for each in inputs_of(config))
    labels, their_labels = labels_of(config, inputs.get("decoder_tokens", inputs["tokens"]))
    loss = model(**inputs, labels=labels) / (labels != IGNORE).sum()
    loss.backward()
    expected = reference(**theirs, labels=their_labels).loss
    expected.backward()
    torch.testing.assert_close(loss, expected)
    # Saved in place of the weights, the gradients of transformers have our names when they are read.
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(torch.zeros(()) if parameter.grad is None else parameter.grad)
    reference.save_pretrained(tmp_path / "gradients")
    gradients = build_model(config)
    load_weights(gradients, open_weights(tmp_path / "gradients"))
    compared = 0
    for key, expected in gradients.named_parameters():
        found = model.get_parameter(key).grad
        if found is not None:
            limit = 1e-4 if key.endswith("sinks.weight") else 5e-5  # sums over all tokens, of both signs
            expected = expected.detach()
            # The exact gradient of a bias of keys is 0: it cancels in the softmax.
            exact = 2e-6 if key.endswith("wk.bias") else 0.0
            assert float((found - expected).abs().max()) < limit * float(expected.abs().max()) + exact, key
            compared += 1
    assert compared == sum(parameter.requires_grad for parameter in model.parameters())


def test_a_model_in_bfloat16_routes_as_that_of_transformers(tmp_path: Path, alone: None) -> None:
    """The balancing bias is in float32 in the folder, in the model of transformers and in ours, and so are logits and scores."""
    config = config_of("DeepSeek-V3")
    folder = export_model(model_of(config), config, tmp_path / "hf", dtype="bfloat16")
    stored = safetensors.torch.load_file(folder / "model-00001-of-00001.safetensors")
    in_float32 = {name for name, tensor in stored.items() if tensor.dtype == torch.float32}
    assert in_float32 == {name for name in stored if name.endswith("e_score_correction_bias")} != set()
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = load_for_generation(open_weights(folder), build_mesh("cpu"), torch.device("cpu"), "bfloat16")
    gates = [layer.mlp.gate for layer in reference.model.layers if hasattr(layer.mlp, "gate")]
    for router, gate in zip(routers(model), gates, strict=True):
        assert torch.equal(router.expert_bias, gate.e_score_correction_bias)
        x = torch.randn(1, 1000, config.dim, generator=torch.Generator().manual_seed(0)).bfloat16()
        with torch.no_grad():
            found, (*_, weights, expected) = router(x), gate(x)
        assert torch.equal(found.indices[0].sort(-1).values, expected.sort(-1).values)
        # The same weights, but for their order.
        torch.testing.assert_close(
            found.weights[0].float().sort(-1).values, weights.float().sort(-1).values, rtol=2**-8, atol=0
        )


def mxfp4(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Replaces the experts of GPT-OSS by random ones in MXFP4, as it is published. Returns these in bfloat16, by transformers."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator, expected = torch.Generator().manual_seed(0), {}
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        num_experts, inputs, outputs = tensors.pop(name).shape
        shape = (num_experts, outputs, inputs // 32, 16)
        blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        scales = torch.randint(118, 124, shape[:-1], dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    return expected


def float8(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Quantizes the linear layers of the blocks of DeepSeek-V3 as it is published. Returns what the published rule makes of them:
    each block of 128 x 128 in float32 times its scale, in bfloat16."""
    from transformers.integrations import finegrained_fp8

    theirs = getattr(finegrained_fp8, "Fp8Dequantize", None)  # not in transformers 4
    assert theirs or __version__ < "5"
    expected = {}
    for name in [name for name in tensors if name.endswith("_proj.weight") or name.endswith("_mqa.weight")]:
        matrix = tensors[name].float()
        rows, columns = matrix.shape
        values, found = torch.empty_like(matrix, dtype=torch.float8_e4m3fn), torch.empty_like(tensors[name])
        scales = torch.empty(-(-rows // 128), -(-columns // 128))
        for row, column in itertools.product(*map(range, scales.shape)):
            block = (slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128))
            scales[row, column] = matrix[block].abs().max() / 448.0
            values[block] = (matrix[block] / scales[row, column]).to(torch.float8_e4m3fn)
            found[block] = (values[block].float() * scales[row, column]).bfloat16()
        if theirs and not (rows % 128 or columns % 128):  # transformers 5.24 refuses others
            assert torch.equal(found, theirs(None)._dequantize_one(values, scales, torch.bfloat16))
        tensors |= {name: values, f"{name}_scale_inv": scales}
        expected[name] = found
    return expected


# A config, whose matrices in float8 have several blocks, the last of which are smaller; how its folder is quantized; the key of
# its config.json; and the numbers of quantized tensors.
QUANTIZED: dict[str, tuple[Any, Any, dict[str, Any], int]] = {
    "MXFP4": (GPT_OSS, mxfp4, {"quant_method": "mxfp4"}, 2 * GPT_OSS.num_layers),
    "float8": (
        dataclasses.replace(models.CONFIGS["DeepSeek-V3"], dim=256, ffn_dim=136, dense_ffn_dim=384),  # type: ignore[call-arg]
        float8,
        {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
        3 * 5 + 3 + 2 * 3 * (8 + 1),
    ),
}


def quantized(kind: str, folder: Path) -> dict[str, torch.Tensor]:
    """Exports a model, quantizes the folder, and returns the tensors that are quantized in bfloat16, by name."""
    config, quantize, values, _ = QUANTIZED[kind]
    export_model(model_of(config), config, folder, dtype="bfloat16")
    [file] = folder.glob("*.safetensors")
    tensors = safetensors.torch.load_file(file)
    expected: dict[str, torch.Tensor] = quantize(tensors)
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    published = json.loads((folder / "config.json").read_text()) | {"quantization_config": values}
    (folder / "config.json").write_text(json.dumps(published))
    return expected


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_weights_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    if kind == "float8":
        config_of("DeepSeek-V3")
    config, _, _, number = QUANTIZED[kind]
    expected = quantized(kind, tmp_path / "hf")
    assert len(expected) == number
    weights = open_weights(tmp_path / "hf")
    assert weights.config == config
    # The export has what transformers makes of the blocks, to the bit, beside the other weights.
    export(weights, tmp_path / "again")
    again = {
        key: v
        for file in (tmp_path / "again").glob("*.safetensors")
        for key, v in safetensors.torch.load_file(file).items()
    }
    for name, value in expected.items():
        assert again[name].dtype == torch.bfloat16 and torch.equal(again[name], value), name
    model = build_model(config)
    load_weights(model, weights)
    assert difference(model.float(), load(tmp_path / "again").float(), config) < 1e-5


@pytest.mark.parametrize(
    ("kind", "end", "change", "message"),
    [
        ("MXFP4", "experts.down_proj_scales", None, "lacks model.layers.0.mlp.experts.down_proj"),
        ("MXFP4", "experts.down_proj_blocks", lambda x: x[..., 1:].contiguous(), "not MXFP4; download the folder again"),
        ("float8", "down_proj.weight_scale_inv", None, "down_proj.weight is torch.float8_e4m3fn; use weights in"),
        ("float8", "down_proj.weight_scale_inv", lambda x: x[1:].contiguous(), "not float8 with blocks of 128 x 128; download"),
    ],
)  # fmt: skip
def test_damaged_quantized_weights_are_refused(kind: str, end: str, change: Any, message: str, tmp_path: Path) -> None:
    quantized(kind, tmp_path / "hf")
    [file] = (tmp_path / "hf").glob("*.safetensors")
    tensors = safetensors.torch.load_file(file)
    name = f"model.layers.0.mlp.{end}"
    damaged = tensors.pop(name)
    tensors |= {name: change(damaged)} if change else {}
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserError, match=message):
        open_weights(tmp_path / "hf")


@pytest.mark.parametrize("kind", [*QUANTIZED, "Qwen3-MoE"])
def test_a_shard_of_weights_is_that_of_the_whole(kind: str, tmp_path: Path) -> None:
    """Also if a folder has a tensor of each expert, or quantized blocks."""
    if kind in QUANTIZED:
        config = QUANTIZED[kind][0]
        quantized(kind, tmp_path / "hf")
    else:
        config = dataclasses.replace(CONFIGS[kind], ffn_dim=136)
        export_model(model_of(config), config, tmp_path / "hf")
    weights = open_weights(tmp_path / "hf")
    others = {"MXFP4": "experts.w3_bias", "float8": "shared.w1.weight", "Qwen3-MoE": "router.weight"}
    names = ["experts.w1", "experts.w2", "experts.w3", others[kind]]
    for name in (f"layers.1.feed_forward.{name}" for name in names):
        shape = config.parameters()[name].shape
        full = weights.read(name, whole(shape))
        # Of some experts, and not of whole blocks.
        offset, size = (1, 17, 45)[: len(shape)], (3, 115, 85)[: len(shape)]
        size = tuple(min(n, total - o - 1) for n, o, total in zip(size, offset, shape, strict=True))
        found = weights.read(name, ShardRange(shape, offset, size))
        assert torch.equal(found, full[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))])


@pytest.mark.parametrize("name", ["tied", "GPT-2", "Qwen3-MoE", "Mixtral", "DeepSeek-V3", "GPT-OSS"])
def test_an_import_is_exported_byte_for_byte(name: str, tmp_path: Path) -> None:
    config = config_of(name)
    export_model(model_of(config), config, tmp_path / "first", dtype="bfloat16")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "first", torch_dtype=torch.bfloat16)
    reference.save_pretrained(tmp_path / "saved")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "saved" / file).write_bytes((tmp_path / "first" / file).read_bytes())
    export(open_weights(tmp_path / "saved"), tmp_path / "again", shard_size=50_000)
    index = json.loads((tmp_path / "again/model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "again").glob("*.safetensors"))
    assert len(files) > 1 and set(index["weight_map"].values()) == {file.name for file in files}
    assert index["metadata"]["total_parameters"] == config.num_parameters()
    again = {name: value for file in files for name, value in safetensors.torch.load_file(file).items()}
    expected = safetensors.torch.load_file(tmp_path / "saved/model.safetensors")
    assert again.keys() == expected.keys() == index["weight_map"].keys()
    assert ("lm_head.weight" in again) != config.tied_head
    for key, value in expected.items():
        is_router = name == "DeepSeek-V3" and ".gate." in key  # which transformers keeps in float32
        assert value.dtype == again[key].dtype == (torch.float32 if is_router else torch.bfloat16)
        assert torch.equal(value.view(torch.int16), again[key].view(torch.int16)), key
    load(tmp_path / "again")


@pytest.fixture(scope="module")
def rank_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    text = folder / "text.txt"
    text.write_text("".join(path.read_text() for path in sorted(Path(__file__).parents[1].glob("data/test_[a-d]*.py"))))
    for name in ("tokenizer.model", "tokenizer.json"):
        train([str(text)], folder / name, 600)
    return folder / "tokenizer.model"


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize(
    ("kind", "special"),
    [
        ("bytes", "eos"),
        *itertools.product(("ranks", "json", "json with BOS", "json with both"), ("eos", "bos", "both")),
    ],
)
def test_auto_tokenizer_gives_the_same_tokens(
    kind: str, special: str, closes: bool, rank_file: Path, tmp_path: Path
) -> None:
    """BOS begins a text if it begins the documents of the training. EOS ends it for an encoder only."""
    encodings = {"bytes": "bytes", "ranks": str(rank_file), "json": str(rank_file.with_suffix(".json"))}
    section = Tokenizer(encoding=encodings.get(kind, ""), special=special)  # type: ignore[arg-type]
    if kind.startswith("json with"):
        first = build_tokenizer(Tokenizer(encoding=str(rank_file), special="both"))
        (tmp_path / "first").mkdir()
        for name, content in tokenizer_files(first, 256, closes=kind == "json with both").items():
            (tmp_path / "first" / name).write_bytes(content)
        section = Tokenizer(encoding=str(tmp_path / "first"), special=special)  # type: ignore[arg-type]
    ours = build_tokenizer(section)
    (tmp_path / "hf").mkdir()
    for name, content in tokenizer_files(ours, 256, closes=closes).items():
        (tmp_path / "hf" / name).write_bytes(content)
    (tmp_path / "hf/config.json").write_text(json.dumps(LLAMA.to_hugging_face()))
    reference = AutoTokenizer.from_pretrained(tmp_path / "hf")
    expected = ours.encode(NASTY).tolist()
    assert reference(NASTY, add_special_tokens=False).input_ids == expected
    assert reference.decode(expected) == NASTY
    begin, end = ([] if token is None else [token] for token in (ours.bos, ours.eos if closes else None))
    assert reference(NASTY).input_ids == begin + expected + end
    contents = [
        json.loads((tmp_path / "hf" / name).read_text()) for name in ("tokenizer.json", "tokenizer_config.json")
    ]
    if kind in ("bytes", "ranks"):  # with all keys, as tokenizers writes them
        assert json.loads(tokenizers.Tokenizer.from_file(str(tmp_path / "hf/tokenizer.json")).to_str()) == contents[0]
    assert adds_bos_and_eos(*contents) == (special != "eos", closes and special != "bos")
    assert adds_bos_and_eos({}, {"add_bos_token": True}) == (True, False)  # as DeepSeek's
    assert ours.eos in (None, reference.eos_token_id)
