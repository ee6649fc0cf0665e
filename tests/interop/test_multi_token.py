"""Multi-token prediction of DeepSeek-V3: its inputs and labels, and its gradients, which a plain loop over transformers' modules
gives, too."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.interop.models import CONFIGS, export_model, model_of
from tests.loss_errors import linear_cross_entropy
from tests.training import MULTI_TOKEN, tiny
from titanlike.config import UserError
from titanlike.config.sections import Parallelism
from titanlike.data.batches.loader import BatchLoader
from titanlike.data.batches.packed_dataset import SequenceBatch
from titanlike.data.tokens.tokenizer import Separator
from titanlike.interop.weights import load_weights, open_weights
from titanlike.losses import IGNORE
from titanlike.losses.terms import LossTerms
from titanlike.models.deepseek.config import DEEPSEEK_V3_SIZES, DeepseekV3Config
from titanlike.models.registry import build_model
from titanlike.recipe.distill import DistillRecipe
from titanlike.recipe.dpo import DpoRecipe
from titanlike.run.checks import check_recipe

EOS = 9
CONFIG = dataclasses.replace(CONFIGS["DeepSeek-V3"], num_mtp_layers=2, mtp_loss_weight=0.6)  # type: ignore[call-arg]


class Source:
    """A batch of given tokens."""

    fingerprint = ""

    def __init__(self, tokens: Any, loss_mask: Any = None) -> None:
        self.batch = SequenceBatch(np.arange(len(tokens)), tokens, loss_mask)
        self.seq_len = tokens.shape[1] - 1

    def read(self, step: int, rows: range) -> SequenceBatch:
        return self.batch

    def position(self) -> None:
        return None


def batch_of(tokens: Any, number: int, loss_mask: Any = None, position_ids: Tensor | None = None) -> dict[str, Tensor]:
    """Returns what a rank reads of sequences whose documents end with `EOS`."""
    loader = BatchLoader(
        Source(tokens, loss_mask),  # type: ignore[arg-type]
        global_batch_size=len(tokens), local_batch_size=len(tokens), data_rank=0, num_data_ranks=1, seed=0,
        device=torch.device("cpu"), document_separator=Separator(EOS, True), num_next_tokens=number, position_ids=position_ids,
    )  # fmt: skip
    (batch,) = loader.microbatches(1)
    return batch.inputs | {"labels": batch.labels}


def sequences(vocab_size: int, length: int, num_sequences: int = 2) -> Any:
    """Returns tokens of documents of a few tokens."""
    tokens = np.random.default_rng(1).integers(EOS + 1, vocab_size, (num_sequences, length + 1))
    for row, first in enumerate(range(3, 3 + num_sequences)):
        tokens[row, first::11] = EOS
    return tokens


def test_labels_of_further_tokens_end_with_documents_sequences_and_answers() -> None:
    tokens = sequences(40, 24)
    loss_mask = np.random.default_rng(2).random(tokens.shape) < 0.7
    found = batch_of(tokens, 3, loss_mask)
    document = np.pad((tokens == EOS).cumsum(1), ((0, 0), (1, 0)))[:, :-1]
    for row in range(2):
        for i in range(24):
            for k in range(1, 4):
                label, is_inside = IGNORE, i + k + 1 <= 24
                if is_inside and loss_mask[row, i + k + 1] and document[row, i] == document[row, i + k + 1]:
                    label = tokens[row, i + k + 1]
                assert found["next_labels"][row, i, k - 1] == label, (row, i, k)
                assert found["next_tokens"][row, i, k - 1] == (tokens[row, i + k] if i + k <= 24 else 0), (row, i, k)
    of_rank = torch.tensor([0, 1, 2, 21, 22, 23])
    shard = batch_of(tokens, 3, loss_mask, of_rank)
    assert all(torch.equal(shard[name], found[name][:, of_rank]) for name in ("next_labels", "next_tokens", "labels"))


def decoder_layers(folder: Path, config: Any) -> list[dict[str, Any]]:
    """Returns the modules of multi-token prediction in a folder, with transformers' block."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer

    tensors = safetensors.torch.load_file(folder / "model-00001-of-00001.safetensors")
    found = []
    for index in range(CONFIG.num_layers, CONFIG.num_layers + CONFIG.num_mtp_layers):
        prefix = f"model.layers.{index}."
        own = {name.removeprefix(prefix): value.float() for name, value in tensors.items() if name.startswith(prefix)}
        names = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
        parts: dict[str, Any] = {name: own.pop(name).requires_grad_() for name in names}
        assert torch.equal(own.pop("embed_tokens.weight"), tensors["model.embed_tokens.weight"])
        assert torch.equal(own.pop("shared_head.head.weight"), tensors["lm_head.weight"])
        block = DeepseekV3DecoderLayer(config, index)
        experts = range(CONFIG.num_experts)  # transformers 5 stacks them
        gate, up, down = (
            torch.stack([own.pop(f"mlp.experts.{i}.{name}.weight") for i in experts])
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        own |= {"mlp.experts.gate_up_proj": torch.cat((gate, up), 1), "mlp.experts.down_proj": down}
        block.load_state_dict(own)
        found.append(parts | {"block": block})
    return found


def test_gradients_equal_those_of_a_loop_over_modules_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = model_of(CONFIG)
    batch = batch_of(sequences(CONFIG.vocab_size, 40), 2)
    num_tokens = (batch["labels"] != IGNORE).sum()
    (model(**batch) / num_tokens).backward()

    folder = export_model(model, CONFIG, tmp_path / "hf")
    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float()
    layers = decoder_layers(folder, reference.config)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + CONFIG.norm_eps).rsqrt() * weight

    tokens, positions, documents = (batch[name] for name in ("tokens", "position_ids", "document_ids"))
    length = tokens.shape[1]
    allowed = (documents[:, :, None] == documents[:, None]) & torch.ones(length, length).tril().bool()
    mask = torch.zeros(len(tokens), 1, length, length).masked_fill(~allowed[:, None], -torch.inf)
    embed, head = reference.model.embed_tokens.weight, reference.lm_head.weight
    h = reference.model(tokens, attention_mask=mask, position_ids=positions).last_hidden_state
    loss = F.cross_entropy((h @ head.T).flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    full = sequences(CONFIG.vocab_size, 40)
    for k, layer in enumerate(layers, start=1):
        following = torch.from_numpy(np.pad(full[:, k:], ((0, 0), (0, k - 1))))  # t_{i + k} at i
        both = torch.cat((norm(embed[following], layer["enorm.weight"]), norm(h, layer["hnorm.weight"])), -1)
        rotary = reference.model.rotary_emb(h, positions)
        x = both @ layer["eh_proj.weight"].T
        h = layer["block"](x, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        h = norm(h[0] if isinstance(h, tuple) else h, layer["shared_head.norm.weight"])
        for row in range(len(tokens)):
            for i in range(length - k):
                if documents[row, i] == documents[row, i + k] and batch["labels"][row, i + k] != IGNORE:
                    logits, label = h[row, i] @ head.T, batch["labels"][row, i + k]
                    loss = loss + 0.6 / 2 * (logits.logsumexp(-1) - logits[label])
    (loss / num_tokens).backward()

    index = CONFIG.num_layers
    pairs = {
        "tok_embeddings.weight": embed,
        "output.weight": head,
        "norm.weight": reference.model.norm.weight,
        "layers.0.ffn_norm.weight": reference.model.layers[0].post_attention_layernorm.weight,
        "layers.1.attention.wo.weight": reference.model.layers[1].self_attn.o_proj.weight,
    }
    for i, layer in enumerate(layers):
        names = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "head_norm": "shared_head.norm"}
        pairs |= {f"layers.{index + i}.{one}.weight": layer[f"{other}.weight"] for one, other in names.items()}
        block = layer["block"]
        pairs |= {
            f"layers.{index + i}.attention.wkv_b.weight": block.self_attn.kv_b_proj.weight,
            f"layers.{index + i}.attention_norm.weight": block.input_layernorm.weight,
            f"layers.{index + i}.feed_forward.router.weight": block.mlp.gate.weight,
            f"layers.{index + i}.feed_forward.experts.w2": block.mlp.experts.down_proj,
            f"layers.{index + i}.feed_forward.shared.w1.weight": block.mlp.shared_experts.gate_proj.weight,
        }
    for name, parameter in pairs.items():
        found, expected = model.get_parameter(name).grad, parameter.grad
        assert float((found - expected).abs().max() / expected.abs().max()) < 1e-4, name


def test_validation_and_the_reported_loss_leave_out_further_tokens() -> None:
    model = model_of(CONFIG)
    batch = batch_of(sequences(CONFIG.vocab_size, 40), 2)
    without = {name: value for name, value in batch.items() if not name.startswith("next_")}
    expected = model(**without)
    assert torch.equal(model(**batch), expected)
    model.layers["3"].forward = None  # not called
    with torch.no_grad():
        assert torch.equal(model(**batch), expected)
        model(batch["tokens"])


@pytest.mark.parametrize("chunk", [0, 5, 7, 100])
@pytest.mark.parametrize("from_logits", [False, True])
def test_the_loss_of_auxiliary_sequences_has_a_gradient_only(chunk: int, from_logits: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(shape, generator=generator).requires_grad_() for shape in ((6, 4, 8), (11, 8)))
    labels = torch.randint(0, 11, (6, 4), generator=generator)
    labels[1, 2] = labels[4, 0] = IGNORE
    logits = x @ weight.T
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").unflatten(0, (6, 4)).sum(1)
    expected = torch.autograd.grad(losses[:2].sum() + 0.3 * losses[2:].sum(), (x, weight), retain_graph=True)
    inputs = (logits, None) if from_logits else (x, weight)
    found = linear_cross_entropy(*inputs, labels, chunk=chunk, auxiliary=(4, 0.3))
    torch.testing.assert_close(found, losses[:2].sum())
    torch.testing.assert_close(torch.autograd.grad(found, (x, weight)), expected)
    terms = LossTerms(["z_loss", "mtp_loss"])
    linear_cross_entropy(*inputs, labels, chunk=chunk, auxiliary=(4, 0.3), z_loss=0.1, terms=terms)
    squares = (0.1 * logits.logsumexp(-1).square() * (labels != IGNORE))[:2].sum()
    expected_sums = torch.stack([torch.stack((squares, losses[2:].sum())), torch.tensor([7.0, 14.0])], 1).double()
    torch.testing.assert_close(terms.sums, expected_sums, rtol=1e-6, atol=0.0)  # both are computed in float32


def test_the_published_model_has_the_published_number_of_parameters() -> None:
    config = DeepseekV3Config(**DEEPSEEK_V3_SIZES["671B"], size="671B", num_mtp_layers=1)
    copies = sum(np.prod(config.parameters()[name].shape) for name in config.hf_copies().values())
    # What the published folder holds, without the scales of its float8 matrices.
    assert config.num_parameters() + copies == 684_489_845_504
    assert config.num_parameters() - dataclasses.replace(config, num_mtp_layers=0).num_parameters() == 11_610_068_224
    assert config.label() == "deepseek_v3 671B"


def test_flops_of_further_tokens() -> None:
    config = MULTI_TOKEN
    one = dataclasses.replace(config, num_mtp_layers=0)
    keys, heads, matrix = 16, config.num_heads, config.dim * config.dim
    queries = 24 * config.dim + heads * config.head_dim * 24
    latent = (config.kv_lora_rank + config.qk_rope_head_dim) * config.dim
    values = heads * (config.qk_nope_head_dim + config.v_head_dim) * config.kv_lora_rank
    out = heads * config.v_head_dim * config.dim
    experts = 3 * config.ffn_dim * config.dim * (config.experts_per_token + config.num_shared_experts)
    block = queries + latent + values + out + experts + config.num_experts * config.dim
    each = (
        6 * (block + 2 * matrix + config.vocab_size * config.dim)
        + 6 * heads * (config.head_dim + config.v_head_dim) * keys
    )
    assert config.flops_per_token(keys) - one.flops_per_token(keys) == 2 * each


def test_weights_have_the_published_names_and_may_be_left_out(tmp_path: Path) -> None:
    model = model_of(CONFIG)
    folder = export_model(model, CONFIG, tmp_path / "hf")
    names = safetensors.torch.load_file(folder / "model-00001-of-00001.safetensors").keys()
    own = {name.removeprefix("model.layers.4.") for name in names if name.startswith("model.layers.4.")}
    block = {name.removeprefix("model.layers.1.") for name in names if name.startswith("model.layers.1.")}
    further = ("enorm", "hnorm", "eh_proj", "embed_tokens", "shared_head.norm", "shared_head.head")
    assert own - block == {f"{name}.weight" for name in further} and block <= own
    weights = open_weights(folder)
    assert weights.config.num_mtp_layers == 2
    for number in (0, 2):
        config = dataclasses.replace(CONFIG, num_mtp_layers=number)
        again = build_model(config)
        load_weights(again, weights)
        expected = dict(model.named_parameters())
        assert all(torch.equal(value, expected[name]) for name, value in again.named_parameters())
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "saved")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "saved" / file).write_bytes((folder / file).read_bytes())
    assert open_weights(tmp_path / "saved").config.num_mtp_layers == 0


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (
            tiny(Path(), "run", model=MULTI_TOKEN, parallelism=Parallelism(pipeline=2)),
            "the embedding is in the first stage",
        ),
        (DpoRecipe(model=MULTI_TOKEN), "preference loss"),
        (DistillRecipe(model=MULTI_TOKEN), "distillation is of the next token"),
    ],
    ids=["pipeline", "dpo", "distill"],
)
def test_programs_that_cannot_predict_further_tokens_refuse_them(recipe: Any, message: str) -> None:
    with pytest.raises(UserError, match=rf"model.num_mtp_layers = 2.*{message}"):
        check_recipe(recipe, 2)
