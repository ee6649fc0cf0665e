"""The memory of a simulated step against that which torch's profiler sees in a real one."""

import gc
import itertools
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.balanced_experts import balance_experts
from tests.pool import Ranks
from tests.simulated_memory.simulate import simulate
from tests.simulated_memory.storage_tracker import StorageTracker
from tests.training import build, tiny
from titanlike.data.batches.loader import Batch
from titanlike.models.deepseek.config import DeepseekV3Config
from titanlike.models.gemma.config import Gemma3Config
from titanlike.models.gpt.config import GPTConfig
from titanlike.models.gpt_oss.config import GptOssConfig
from titanlike.models.llama.config import LlamaConfig
from titanlike.models.moe.config import MixtralConfig
from titanlike.models.qwen.config import Qwen2Config, Qwen3Config
from titanlike.optim.clipping import clip_gradients, gradient_norms
from titanlike.optim.optimizer import build_optimizer
from titanlike.recipe import PretrainRecipe
from titanlike.run.loop import forward_backward
from titanlike.tools.planning.job import Job

MARKER = 12345  # bytes, a size that no other tensor has
STEPS = 3  # that are measured
LLAMA = LlamaConfig(dim=128, num_layers=6, num_heads=4, num_kv_heads=2, ffn_dim=384, vocab_size=2048)
GPT = GPTConfig(dim=128, num_layers=6, num_heads=4, vocab_size=2048)
QWEN2 = Qwen2Config(dim=128, num_layers=6, num_heads=4, num_kv_heads=2, ffn_dim=384, vocab_size=2048)
QWEN3 = Qwen3Config(
    dim=128, num_layers=6, num_heads=4, num_kv_heads=2, head_dim=64, ffn_dim=384, vocab_size=2048, tied_head=True
)

# Without soft-capped scores, which only FlexAttention does not keep.
GEMMA3 = Gemma3Config(
    dim=128, num_layers=6, num_heads=4, num_kv_heads=2, head_dim=64, ffn_dim=384, vocab_size=2048, sliding_window=40
)

MIXTRAL = MixtralConfig(dim=128, num_layers=6, num_heads=4, num_kv_heads=2, ffn_dim=128, vocab_size=2048, num_experts=4)
# Fewer blocks without experts than stages of a simulated model have blocks, of which it has six.
DEEPSEEK_V3 = DeepseekV3Config(
    dim=128,
    num_layers=8,
    num_heads=4,
    num_dense_layers=2,
    dense_ffn_dim=384,
    ffn_dim=128,
    vocab_size=2048,
    q_lora_rank=48,
)

GPT_OSS = GptOssConfig(
    dim=128, num_layers=6, num_heads=4, num_kv_heads=2, ffn_dim=128, vocab_size=2048, num_experts=4, sliding_window=40
)

CASES: dict[str, tuple[dict[str, int | str], dict[str, Any]]] = {
    "one process": (dict(), {}),
    "one process, GPT": (dict(), dict(model=GPT)),
    "FSDP": (dict(shard=2), {}),
    "FSDP, selective": (dict(shard=2), dict(activation_checkpoint=dict(mode="selective"))),
    "FSDP, full": (dict(shard=2), dict(activation_checkpoint=dict(mode="full"))),
    "HSDP": (dict(replicate=2, shard=2), {}),
    "TP x FSDP": (dict(tensor=2, shard=2), {}),
    "TP x FSDP, Qwen2": (dict(tensor=2, shard=2), dict(model=QWEN2)),
    "TP x FSDP, Qwen3": (dict(tensor=2, shard=2), dict(model=QWEN3)),
    "FSDP, Gemma 3": (dict(shard=2), dict(model=GEMMA3)),
    "TP x FSDP, Gemma 3, full": (dict(tensor=2, shard=2), dict(model=GEMMA3, activation_checkpoint=dict(mode="full"))),
    "MoE, FSDP": (dict(shard=2), dict(model=MIXTRAL)),
    "MoE, EP": (dict(shard=2, expert=2), dict(model=MIXTRAL)),
    "MoE, EP x FSDP": (dict(shard=4, expert=2), dict(model=MIXTRAL)),
    "MLA, EP x FSDP": (dict(shard=4, expert=2), dict(model=DEEPSEEK_V3)),
    "Sinks, FSDP": (dict(shard=2), dict(model=GPT_OSS)),
    "Sinks, EP x FSDP": (dict(shard=4, expert=2), dict(model=GPT_OSS)),
    "MTP, FSDP": (dict(shard=2), dict(model=replace(DEEPSEEK_V3, num_mtp_layers=1))),
    "CP x FSDP": (dict(context=2, shard=2), {}),
    "PP x FSDP": (dict(pipeline=2, shard=2), {}),
    "FSDP, float8": (
        dict(shard=2),
        dict(float8=dict(scaling="tensorwise", layers=("*",), emulate=True, all_gather=True)),
    ),
}
QUICK = ("one process",)
SLOW = ("TP x FSDP", "FSDP, float8")


def tier(case: str) -> list[pytest.MarkDecorator]:
    return [] if case in QUICK else [pytest.mark.slow if case in SLOW else pytest.mark.every]


def _peaks_of_a_step(recipe: PretrainRecipe) -> tuple[int, int]:
    """Returns the peak of the bytes in use in a step after the first: those of the operators' results, and those that torch's CPU
    allocator has given out according to its profiler. Each is the smallest peak of several steps, because communication that
    ends late holds its buffers longer on a busy machine."""
    job = Job(recipe, torch.distributed.get_world_size())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, StorageTracker() as tracker:
        model, mesh = build(recipe)
        balance_experts(model)
        optimizer = build_optimizer(model, recipe.optimizer)
        length = recipe.training.seq_len // job.layout.context
        tokens = torch.zeros(job.sequences, length, dtype=torch.long)
        inputs = {"tokens": tokens, "position_ids": tokens.clone()}
        if further := recipe.model.num_mtp_layers:
            inputs |= dict.fromkeys(("next_tokens", "next_labels"), tokens[..., None].expand(-1, -1, further))
        batch = Batch(inputs, tokens)
        begins = []
        for step in range(1 + STEPS):
            gc.collect()  # reference cycles keep tensors until then
            if step > 0:
                marker, begin = torch.empty(MARKER, dtype=torch.uint8), tracker.now
                begins.append(begin)
                del marker
            num_tokens = torch.tensor(tokens.numel() * job.num_microbatches)
            microbatches = [batch] * job.num_microbatches
            forward_backward(model, microbatches, num_tokens, mesh)
            clip_gradients(model, gradient_norms(model, mesh.pipeline).total, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    starts = [index for index, change in enumerate(changes) if change == MARKER]
    assert len(starts) == STEPS
    allocated = list(itertools.accumulate(changes))
    seen = [(a.begin, a.size) for a in tracker.allocations] + [(a.end, -a.size) for a in tracker.allocations if a.end]
    in_use = list(itertools.accumulate(sorted(seen), lambda total, change: (change[0], total[1] + change[1])))
    return (
        min(max(total for time, total in in_use if begin < time < end) for begin, end in pairwise([*begins, math.inf])),
        min(max(allocated[start:end]) for start, end in pairwise([*starts, None])),
    )


@pytest.mark.parametrize("case", [pytest.param(case, marks=tier(case)) for case in CASES])
def test_simulated_memory_is_that_of_a_real_step(ranks: Ranks, tmp_path: Path, case: str) -> None:
    layout, sections = CASES[case]
    # Two micro-batches or more.
    size = 16 if layout else 4
    training = dict(compute_dtype="float32", seq_len=256, local_batch_size=2, global_batch_size=size, loss_chunk=128)
    recipe = tiny(
        tmp_path, "run", parallelism={"shard": 1} | layout, **{"model": LLAMA, "training": training} | sections
    )
    num_ranks = math.prod(recipe.parallelism.dimensions().values())
    job = Job(recipe, num_ranks)
    pool = ranks(num_ranks)
    found = pool.run(_peaks_of_a_step, recipe)
    # If torch's profiler stops during a collective of gloo, a thread of gloo writes to memory that it has freed.
    pool.close()
    for rank in range(job.layout.pipeline):
        # Both can miss that memory is freed: the profiler by threads of gloo, the tracker while torch keeps a Python object.
        # A pipeline stage receives while it computes, so that its peak depends on when messages arrive.
        rel = 0.1 if job.layout.pipeline > 1 else 0.02
        in_use, allocated = (pytest.approx(peak, rel=rel) for peak in found[rank * num_ranks // job.layout.pipeline])
        assert simulate(job, rank, "cpu").allocated in (in_use, allocated), f"pipeline rank {rank}"
