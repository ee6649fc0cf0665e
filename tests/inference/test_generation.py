"""Generation: the KV cache, sampling, stop strings, streaming, and parity with transformers."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.inference.prompts import PROMPTS, byte_tokenizer, tokens_of
from tests.interop.models import CONFIGS, MemoryWeights, export_model, model_of
from tests.pool import Ranks, user_error
from titanlike.config import UserError
from titanlike.config.sections import Tokenizer as TokenizerSection
from titanlike.inference.generation import TextStream, generate
from titanlike.inference.logits import recomputed_logits
from titanlike.inference.sampling import Sampler, Sampling, next_token_probs
from titanlike.models.common.config import TransformerConfig
from titanlike.models.common.document_mask import DocumentMask
from titanlike.models.common.layers import DotProductAttention
from titanlike.models.registry import blocks
from titanlike.parallelisms.mesh import Mesh, build_mesh
from titanlike.tools.inference.cached_logits import CachedLogits, check_prompts
from titanlike.tools.inference.kv_cache import CachedAttention, apply_kv_cache
from titanlike.tools.inference.load import load_for_generation

CPU = torch.device("cpu")
# For several processes: sizes that two divide.
EVEN: dict[str, TransformerConfig] = {
    name: dataclasses.replace(CONFIGS[name], vocab_size=320)
    for name in ("grouped-query", "GPT-2", "Gemma 2", "Qwen3-MoE", "DeepSeek-V3", "GPT-OSS")  # type: ignore[type-var]
}


def cached(model: nn.Module, mesh: Mesh, config: TransformerConfig, count: int) -> CachedLogits:
    return CachedLogits(model, mesh, max_new_tokens=count, max_length=config.max_seq_len, device=CPU)


@pytest.mark.parametrize("name", ["grouped-query", "GPT-2", "Gemma 3", "DeepSeek-V2", "GPT-OSS"])
def test_greedy_tokens_with_a_cache_equal_those_without(name: str, alone: None) -> None:
    config, mesh, count = CONFIGS[name], build_mesh("cpu"), 16
    model = model_of(config)
    prompts = [byte_tokenizer().opening(prompt) for prompt in PROMPTS]
    alone_each = [
        tokens_of(recomputed_logits(model, mesh, len(prompt) + count, CPU), [prompt], count, config.vocab_size)[0]
        for prompt in prompts
    ]
    with cached(model, mesh, config, count) as next_logits:
        together = tokens_of(next_logits, prompts, count, config.vocab_size)
    assert together == alone_each
    assert len({tuple(sequence[-count:]) for sequence in together}) == len(prompts)  # the prompts matter
    # The model is as before.
    assert all(type(block.attention.attend) is DotProductAttention for block in blocks(model).values())
    assert (
        tokens_of(recomputed_logits(model, mesh, 60, CPU), prompts[:1], 5, config.vocab_size)[0]
        == together[0][: len(prompts[0]) + 5]
    )


def test_the_cache_is_not_longer_than_the_context(alone: None) -> None:
    config = dataclasses.replace(CONFIGS["grouped-query"], max_seq_len=64)  # type: ignore[type-var]
    model, mesh = model_of(config), build_mesh("cpu")
    prompts = [byte_tokenizer().opening(prompt) for prompt in PROMPTS]
    with cached(model, mesh, config, 10**6) as next_logits:
        texts = generate(
            next_logits, prompts, byte_tokenizer(), Sampling(), seed=0, max_new_tokens=10**6, max_length=64
        )
        caches = [
            one for module in model.modules() if isinstance(module, CachedAttention) for one in module.cache or ()
        ]
    assert {cache.shape[2] for cache in caches} == {max(map(len, prompts)) + 64 - min(map(len, prompts))}
    assert any(texts)


def test_misuse_of_the_cache_is_reported() -> None:
    config = CONFIGS["grouped-query"]
    model = model_of(config)
    with pytest.raises(UserError, match=r"the submodule wrong\.attend, which Block does not have"):
        apply_kv_cache(blocks(model), batch_size=1, max_length=4, attention="wrong.attend")
    too_small = "holds 1 sequences of 4 tokens, not 1 of 5; apply a larger one"
    with apply_kv_cache(blocks(model), batch_size=1, max_length=4), pytest.raises(UserError, match=too_small):
        model(torch.zeros(1, 5, dtype=torch.long))
    masks = [module for module in model.modules() if isinstance(module, DocumentMask)]
    options: dict[str, Any] = dict(batch_size=1, max_length=4, document_masks=masks)
    with apply_kv_cache(blocks(model), **options), pytest.raises(UserError, match="document_ids"):
        model(torch.zeros(1, 4, dtype=torch.long), document_ids=torch.zeros(1, 4))


def _generated(name: str) -> list[str]:
    """Loads this rank's shards and returns the text after each prompt."""
    config, mesh = EVEN[name], build_mesh("cpu", tensor=torch.distributed.get_world_size())
    weights = MemoryWeights(model_of(config), config, TokenizerSection())
    model = load_for_generation(weights, mesh, CPU, "float32")
    tokenizer = byte_tokenizer()
    texts = []
    for sampling in (Sampling(), Sampling(0.9, 50, 0.95)):
        with cached(model, mesh, config, 12) as next_logits:
            texts += generate(
                next_logits, [tokenizer.opening(prompt) for prompt in PROMPTS], tokenizer, sampling, max_new_tokens=12, seed=3
            )  # fmt: skip
    return texts


@pytest.mark.parametrize(
    "name", [name if name != "Gemma 2" else pytest.param(name, marks=pytest.mark.slow) for name in EVEN]
)
def test_tensor_parallel_text_equals_that_of_one_process(ranks: Ranks, name: str) -> None:
    [expected] = ranks(1).run(_generated, name)
    assert ranks(2).run(_generated, name) == [expected, expected]
    assert len(set(expected)) == len(expected)


def test_processes_that_do_not_divide_the_model_are_refused(ranks: Ranks) -> None:
    assert ranks(4).run(_refusal)[0] == "4 tensor-parallel processes do not divide model.num_kv_heads = 2; use 1 or 2"


def _refusal() -> str:
    config = EVEN["grouped-query"]
    weights = MemoryWeights(nn.Module(), config, TokenizerSection())
    return user_error(load_for_generation, weights, build_mesh("cpu", tensor=4), CPU, "float32")


@pytest.mark.filterwarnings("default")  # those of transformers are not ours
@pytest.mark.parametrize(
    "name",
    [
        *("Llama 3.1", "Gemma 3", "Qwen3-MoE", "DeepSeek-V3", "GPT-OSS"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("GPT-2", "Gemma 2", "Mixtral", "DeepSeek-V2")),
    ],
)
def test_greedy_text_equals_that_of_transformers(name: str, tmp_path: Path, alone: None) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # As many tokens as the tokenizer has: transformers may choose the others.
    config = dataclasses.replace(CONFIGS[name], vocab_size=257)  # type: ignore[type-var]
    model, count = model_of(config), 24
    folder = export_model(model, config, tmp_path / "hf")
    reference, reference_tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    tokenizer = byte_tokenizer()
    prompts = [prompt for prompt in PROMPTS if prompt]
    expected = []
    for prompt in prompts:
        inputs = reference_tokenizer(prompt, return_tensors="pt")
        out = reference.generate(**inputs, do_sample=False, max_new_tokens=count, pad_token_id=0)
        expected.append(reference_tokenizer.decode(out[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))
    with cached(model, build_mesh("cpu"), config, count) as next_logits:
        found = generate(
            next_logits, [tokenizer.opening(p) for p in prompts], tokenizer, Sampling(), max_new_tokens=count, seed=0
        )
    assert found == expected


def reference_probs(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """Top-k, then top-p, in plain Python."""
    exp = [2.718281828459045 ** (x / temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    kept = order[: top_k or len(order)]
    total = sum(exp[token] for token in kept)
    chosen, mass = [], 0.0
    for token in kept:
        if mass >= top_p:
            break
        chosen.append(token)
        mass += exp[token] / total
    return [exp[token] / total / mass if token in chosen else 0.0 for token in range(len(logits))]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(0.5, 0, 1.0), (1.0, 5, 1.0), (1.0, 0, 0.6), (2.0, 7, 0.8), (1.0, 0, 1e-6), (1.0, 999, 0.9)],
)
def test_top_k_and_top_p_equal_a_plain_reference(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0)) * 2
    found = next_token_probs(logits, Sampling(temperature, top_k, top_p))
    for row, values in zip(found, logits.tolist(), strict=True):
        expected = torch.tensor(reference_probs(values, temperature, top_k, top_p))
        torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-6)


def test_very_low_temperatures_choose_the_most_likely_token() -> None:
    logits = torch.tensor([[-3.0, 1.0, 0.9, 1.0], [-1e30, -2.0, -1e30, -3.0]])
    for temperature in (1e-6, 1e-39, 5e-324):
        found = next_token_probs(logits, Sampling(temperature))
        assert found.tolist() == [[0.0, 0.5, 0.0, 0.5], [0.0, 1.0, 0.0, 0.0]]


def test_tokens_are_drawn_with_these_probabilities() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    sampler = Sampler(Sampling(1.0, top_k=3), seed=0, sequence_ids=[0])
    counts = torch.zeros(4)
    for _ in range(4000):
        counts[sampler(logits)[0]] += 1
    torch.testing.assert_close(counts / 4000, next_token_probs(logits, sampler.sampling)[0], atol=0.03, rtol=0)


def test_a_sample_depends_on_its_own_number_and_the_seed_only() -> None:
    logits = torch.zeros(3, 1000)
    together = Sampler(Sampling(1.0), seed=1, sequence_ids=[0, 1, 2])(logits)
    assert Sampler(Sampling(1.0), seed=1, sequence_ids=[2])(logits[:1]) == together[2:]
    assert Sampler(Sampling(1.0), seed=2, sequence_ids=[2])(logits[:1]) != together[2:]
    assert len(set(together)) == 3


class Scripted:
    """Logits that make each sequence continue with a text."""

    def __init__(self, texts: Sequence[bytes], vocab_size: int = 257) -> None:
        self.texts, self.vocab_size, self.step = texts, vocab_size, 0

    def __call__(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        logits = torch.zeros(len(sequences), self.vocab_size)
        for row, text in enumerate(self.texts):
            logits[row, text[self.step] if self.step < len(text) else 256] = 1.0  # 256 ends the document
        self.step += 1
        return logits


def written(texts: Sequence[str], **options: object) -> tuple[list[str], list[list[str]]]:
    """Returns the texts that are generated where the model would write `texts`, and the pieces of each."""
    pieces: list[list[str]] = [[] for _ in texts]
    found = generate(
        Scripted([text.encode() for text in texts]), [[65]] * len(texts), byte_tokenizer(), Sampling(), seed=0,
        on_text=lambda index, text: pieces[index].append(text), **({"max_new_tokens": 100} | options),  # type: ignore[arg-type]
    )  # fmt: skip
    assert ["".join(each) for each in pieces] == found
    return found, pieces


def test_streamed_text_has_no_half_characters(alone: None) -> None:
    [text], [pieces] = written(["naïve 漢字 \U0001f600!"])
    assert text == "naïve 漢字 \U0001f600!"
    assert pieces == list(text)
    assert "\N{REPLACEMENT CHARACTER}" in written(["漢"], max_new_tokens=2)[0][0]  # the end is not held back for ever


def test_bytes_that_are_no_text_do_not_hold_back_what_follows() -> None:
    stream = TextStream(byte_tokenizer(), [65])
    found = [stream.add(byte) for byte in (0xFF, 0xFF, 0xFF, 0xFF, 0x61)]
    assert found == ["", "", "", "\ufffd", "\ufffd\ufffd\ufffda"]


def test_stop_strings_across_tokens(alone: None) -> None:
    found, pieces = written(["one END two", "EN ENDED", "no stop", "EN"], stop=["END", "##"])
    assert found == ["one ", "EN ", "no stop", "EN"]
    assert not any("E" in piece and "EN" not in piece for each in pieces for piece in each)  # held back until decided
    stream = TextStream(byte_tokenizer(), [65], ["ab"])
    assert [(stream.add(byte), stream.is_stopped) for byte in b"aab"] == [("", False), ("a", False), ("", True)]


def test_ends_of_a_sequence(alone: None) -> None:
    assert written(["ab", "abcdefgh"], max_new_tokens=4)[0] == ["ab", "abcd"]
    assert written(["abcdef"], max_length=4)[0] == ["abc"]  # with the prompt
    assert written(["abcdef"], stop_tokens=frozenset([ord("c")]))[0] == ["ab"]


def test_a_prompt_longer_than_the_context_is_refused() -> None:
    check_prompts([[1] * 7], 8)
    with pytest.raises(UserError, match=r"prompt 2 has 8 tokens, but the context of the model is 8 .* to 7 tokens"):
        check_prompts([[1], [1] * 8], 8)


def _text_if_ranks_disagree() -> list[str]:
    def next_logits(sequences: Sequence[Sequence[int]]) -> Tensor:
        return torch.eye(257)[[ord("a") + dist.get_rank()] * len(sequences)]

    return generate(next_logits, [[1]], byte_tokenizer(), Sampling(), max_new_tokens=3, seed=0)


def test_all_ranks_continue_with_the_tokens_of_rank_0_if_they_disagree(ranks: Ranks) -> None:
    assert ranks(2).run(_text_if_ranks_disagree) == [["aaa"]] * 2
