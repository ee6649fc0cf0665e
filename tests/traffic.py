"""The collectives of a step: those that run, and those that the planner computes."""

from collections import Counter
from contextlib import nullcontext
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.balanced_experts import balance_experts
from tests.training import build
from titanlike.data.batches.loader import Batch
from titanlike.distributed import process_group
from titanlike.distributed.graceful_shutdown import GracefulShutdown
from titanlike.optim.clipping import clip_gradients, gradient_norms
from titanlike.optim.optimizer import build_optimizer
from titanlike.parallelisms.context import context_position_ids
from titanlike.parallelisms.mesh import Mesh
from titanlike.parallelisms.pipeline import GRADIENT_GROUP, Pipeline
from titanlike.recipe import PretrainRecipe
from titanlike.recipe.distill import DistillRecipe
from titanlike.recipe.dpo import DpoRecipe
from titanlike.recipe.seq2seq import Seq2SeqRecipe
from titanlike.run import distillation, preferences
from titanlike.run.loop import Objective, forward_backward, language_modeling, sum_over_data
from titanlike.run.second_model import build_frozen_model
from titanlike.tools.planning.job import Job
from titanlike.tools.planning.traffic import fsdp_axis, traffic
from titanlike.utils import compat

COLLECTIVES = {"allgather": "all-gather", "all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "allreduce": "all-reduce",
               "all_reduce": "all-reduce", "alltoall": "all-to-all", "all_to_all": "all-to-all", "send": "send",
               "recv": "receive"}  # fmt: skip


class Traffic(TorchDispatchMode):
    """Counts the calls and bytes of collectives by kind and mesh axis.

    Bytes are those of the larger of input and output: all that a rank has after an all-gather or before a reduce-scatter.
    """

    supports_higher_order_operators = True  # of compiled code, such as one that saves the state of a random generator

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        axes = {"pipeline": mesh.pipeline, "tensor": mesh.tensor, "context": mesh.context}
        groups = {name: axis.get_group() for name, axis in axes.items()}
        groups |= {name: mesh.fsdp.get_group(name) for name in mesh.fsdp.mesh_dim_names or ()}
        if mesh.expert is not None and mesh.expert_fsdp is not None:  # last: may be the group of another axis
            groups |= {"expert_shard": mesh.expert_fsdp.get_group(-1), "expert": mesh.expert.get_group(0)}
        # Without FSDP's own dimension, its group is that of the context.
        self.axes = {group.group_name: name for name, group in reversed(groups.items()) if group.size() > 1}
        shards = mesh.fsdp.get_group("shard")
        if mesh.tensor.size() > 1 and shards.size() > 1:  # Muon exchanges matrices over both
            size = mesh.tensor.size() * shards.size()
            both = process_group.subgroup(torch.arange(dist.get_world_size()).view(-1, size).tolist())
            self.axes[both.group_name] = self.axes[shards.group_name]
        if mesh.pipeline.size() > 1 and compat.has_gradient_group():
            self.axes[process_group.copy_of(mesh.pipeline.get_group(), GRADIENT_GROUP).group_name] = "pipeline"
        names = [name for name in ("pipeline", "replicate", "shard", "context", "tensor") if name in self.axes.values()]
        everyone = process_group.subgroup([range(dist.get_world_size())])
        self.axes.setdefault(everyone.group_name, names[0] if names else "")  # as the planner does
        self.total: dict[tuple[str, str], tuple[int, int]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Counts the collectives of compiled code when it runs, not when it is traced."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(func, HigherOrderOperator):
            return result
        name = func.overloadpacket.__name__
        kind = next((kind for prefix, kind in COLLECTIVES.items() if name.strip("_").startswith(prefix)), None)
        if func.namespace not in ("c10d", "_c10d_functional") or kind is None:
            assert func.namespace not in ("c10d", "_c10d_functional") or name in (
                "wait_tensor",
                "_wrap_tensor_autograd",
            )
            return result
        tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor)]
        names = [leaf for leaf in args if isinstance(leaf, str)]
        scripts = [leaf for leaf in args if isinstance(leaf, torch.ScriptObject)]
        group = names[-1] if func.namespace == "_c10d_functional" else dist.ProcessGroup.unbox(scripts[0]).group_name
        calls, size = self.total.get((kind, self.axes[group]), (0, 0))
        self.total[kind, self.axes[group]] = calls + 1, size + max(tensor.nbytes for tensor in tensors)
        return result


Totals = dict[tuple[str, str], tuple[int, int]]  # (kind, mesh axis) -> (calls, bytes) in a step


def count(recipe: PretrainRecipe) -> tuple[Totals, int]:
    """Returns the traffic of a step after an evaluation and a step, and this rank's pipeline rank."""
    if recipe.compile.mode != "none":
        torch._dynamo.reset()
    model, mesh = build(recipe)
    job = Job(recipe, torch.distributed.get_world_size())
    optimizer = build_optimizer(model, recipe.optimizer)
    length = recipe.training.seq_len
    position_ids = context_position_ids(length, mesh.context)
    tokens = torch.zeros(job.sequences, length, dtype=torch.long)[:, position_ids]
    inputs = {"tokens": tokens, "position_ids": position_ids.expand(job.sequences, -1)}
    if recipe.model.dropout:
        inputs["dropout_bits"] = torch.zeros_like(tokens)
    if recipe.data.masks_documents:
        inputs["document_ids"] = torch.zeros_like(tokens)
    if further := recipe.model.num_mtp_layers:
        inputs |= dict.fromkeys(("next_tokens", "next_labels"), tokens[..., None].expand(-1, -1, further))
    labels = tokens
    if isinstance(recipe, Seq2SeqRecipe):
        labels = inputs["decoder_tokens"] = torch.zeros(job.sequences, recipe.target_len, dtype=torch.long)
    batch = Batch(inputs, labels)
    objective: Objective = language_modeling
    none = cast(Any, None)
    if isinstance(recipe, DpoRecipe):
        with mock.patch("titanlike.run.reference.build_frozen_model", wraps=_balanced_model):
            # The data are for the computation of a table.
            objective = preferences.build_objective(recipe, model, mesh, torch.device("cpu"), none)
    elif isinstance(recipe, DistillRecipe):
        with mock.patch("titanlike.run.distillation.build_frozen_model", wraps=_balanced_model):
            objective = distillation.build_objective(recipe, model, mesh, torch.device("cpu"), none, none)
    counter = Traffic(mesh)
    with torch.no_grad():
        _ = model.evaluate([batch]) if isinstance(model, Pipeline) else model(**batch.inputs, labels=batch.labels)
    for context in (nullcontext(), counter):
        with context:
            balance_experts(model)
            num_tokens = sum_over_data(tokens.count_nonzero(), mesh)
            GracefulShutdown().exchange(torch.device("cpu"))
            forward_backward(model, [batch] * job.num_microbatches, num_tokens, mesh, objective=objective)
            clip_gradients(model, gradient_norms(model, mesh.pipeline).total, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return counter.total, mesh.pipeline.get_local_rank()


def _balanced_model(*arguments: Any, **options: Any) -> nn.Module:
    model = build_frozen_model(*arguments, **options)
    balance_experts(model)
    return model


def planned(job: Job, rank: int) -> Totals:
    """Returns what the planner computes, summed over purposes."""
    layout = job.layout
    calls, size = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for collective in traffic(job, rank):
        axis = collective.axis
        if axis == "expert" and layout.expert in (job.num_shards, layout.context):
            # The same process group as that of another axis.
            axis = fsdp_axis(job) if layout.expert == job.num_shards else "context"
        calls[collective.kind, axis] += collective.calls
        size[collective.kind, axis] += collective.bytes
    return {key: (calls[key], size[key]) for key in calls}
