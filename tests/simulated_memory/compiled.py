"""What compiled blocks keep for their backward pass: `torch.compile` on fake tensors, up to the partitioner of forward and backward
pass. No code is generated; the graphs run operator by operator."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.compile_fx import compile_fx
from torch.fx import GraphModule

from tests.simulated_memory.build import build, fake_batch
from tests.simulated_memory.fake_operators import balanced_experts, gpu_operators
from tests.simulated_memory.fakes import fake_process_group, fake_tensors
from tests.simulated_memory.storage_tracker import StorageTracker, is_gathered
from titanlike.models.registry import blocks
from titanlike.parallelisms.mesh import build_mesh
from titanlike.tools.planning.job import Job

BACKEND = "partitioned"


def saved_by_blocks(job: Job) -> list[int]:
    """Returns the bytes that the first pipeline rank keeps from the forward to the backward pass of each of its blocks, beside its
    input, and of its output."""
    torch._dynamo.reset()  # code of other models of the same class
    marks: list[tuple[int, int]] = []
    layout, recipe = job.layout, job.recipe
    with fake_process_group(0, job.num_gpus):
        mesh = build_mesh("cpu", **layout.dimensions(), expert=layout.expert)
        model = build(job, mesh, replace(recipe.compile, backend=BACKEND))
        with (
            fake_tensors(),
            gpu_operators(recipe.training.attention == "auto"),
            balanced_experts(job),
            StorageTracker() as tracker,
        ):
            model.to_empty(device=torch.device("cpu"))
            for block in blocks(model).values():
                block.register_forward_pre_hook(lambda *_: marks.append((tracker.now, 0)))
                block.register_forward_hook(lambda *_: marks.append((marks.pop()[0], tracker.now)))
            batch = fake_batch(job)
            model(**batch.inputs, labels=batch.labels)
    found = [each for each in tracker.allocations if not is_gathered(each)]
    return [
        sum(each.size for each in found if begin < each.begin <= end and (each.end is None or each.end > end))
        for begin, end in marks
    ]


def _compile(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compiles as inductor does, but runs the graphs of the forward and backward pass as they are."""

    def run(graph: GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        return make_boxed_func(graph.forward)

    with torch._functorch.config.patch(enable_autograd_cache=False):  # which keeps generated code only
        return compile_fx(graph, inputs, inner_compile=run)


torch._dynamo.register_backend(_compile, name=BACKEND)
