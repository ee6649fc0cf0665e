"""Generation and evaluation on one GPU: the KV cache with the kernels of a GPU, and bfloat16."""

from pathlib import Path

import pytest
import torch

from tests.inference.prompts import PROMPTS, byte_tokenizer, tokens_of
from tests.inference.tasks import CONFIG, evaluator_of, write_files
from tests.interop.models import CONFIGS, model_of
from titanlike.inference.logits import recomputed_logits
from titanlike.models.common.layers import attention_backend
from titanlike.parallelisms.mesh import build_mesh
from titanlike.tools.inference.cached_logits import CachedLogits
from titanlike.tools.null_gpu.values import compare_values

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
GPU = torch.device("cuda")


@pytest.mark.parametrize("name", ["grouped-query", "GPT-2"])
def test_greedy_tokens_with_a_cache_equal_those_without_on_a_gpu(name: str, alone: None) -> None:
    config, mesh, count = CONFIGS[name], build_mesh("cuda"), 40
    model = model_of(config).to(GPU)
    prompts = [byte_tokenizer().opening(prompt) for prompt in PROMPTS]
    expected = [
        tokens_of(recomputed_logits(model, mesh, len(prompt) + count, GPU), [prompt], count, config.vocab_size)[0]
        for prompt in prompts
    ]
    cached = CachedLogits(model, mesh, max_new_tokens=count, max_length=config.max_seq_len, device=GPU)
    with attention_backend("auto"), cached as next_logits:
        found = tokens_of(next_logits, prompts, count, config.vocab_size)
    assert list(map(len, found)) == list(map(len, expected))
    with compare_values():
        assert found == expected


def test_logits_in_bfloat16_are_near_those_in_float32(alone: None) -> None:
    config, prompts = CONFIGS["grouped-query"], [byte_tokenizer().opening(prompt) for prompt in PROMPTS]
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model = model_of(config).to(GPU, dtype)
        cached = CachedLogits(model, build_mesh("cuda"), max_new_tokens=2, max_length=config.max_seq_len, device=GPU)
        with attention_backend("auto"), cached as next_logits:
            steps = [next_logits(prompts), next_logits([[*prompt, 65] for prompt in prompts])]
        found.append(torch.stack(steps).float())
    with compare_values():
        assert ((found[1] - found[0]).abs().max() / found[0].abs().max()).item() < 0.1  # 0.053 on a CPU


def test_evaluation_on_a_gpu_equals_that_on_a_cpu(tmp_path: Path, alone: None) -> None:
    section = write_files(tmp_path)
    model = model_of(CONFIG)
    expected = evaluator_of(section).evaluate(model, build_mesh("cpu"))
    with attention_backend("auto"):
        found = evaluator_of(section).evaluate(model.to(GPU), build_mesh("cuda"))
    for name, metrics in expected.items():
        assert found[name].keys() == metrics.keys(), name
        with compare_values():
            assert found[name] == pytest.approx(metrics, rel=1e-4), name
