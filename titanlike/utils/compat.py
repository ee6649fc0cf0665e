"""Private APIs of torch that training uses, each in one place, with the reason for its use. `missing` names those that an installed
torch lacks.

Other modules use public APIs only, except for `tools/planning/torch_internals.py`, which has what tools use. Supports torch
2.11 to 2.15: features are probed, versions are not compared.
"""

import importlib
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed import pipelining
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._pytree import tree_map_only as tree_map_only

STATIC_RECOMPILE_LIMIT = 64  # the default of 8 is for code that becomes dynamic instead
MEMORY_EVENTS = 1_000_000  # of a memory snapshot: the last allocations and frees

# Module, attribute path, and what uses it. `tests/source/test_compat.py` checks them against the installed torch.
REQUIRED = (
    ("torch", "_foreach_norm", "gradient norms and float8 scales in one kernel"),
    ("torch", "_foreach_mul_", "gradient clipping in one kernel"),
    ("torch", "Tensor._make_wrapper_subclass", "float8 all-gather"),
    ("torch._C", "_disabled_torch_function_impl", "float8 all-gather"),
    ("torch._dynamo", "disable", "expert parallelism"),
    ("torch._inductor.config", "use_fast_math", "compile.mode on GPUs"),
    ("torch._dynamo.config", "recompile_limit", "two models of different sizes in one process, FlexAttention"),
    ("torch.cuda.memory", "_record_memory_history", "profiling.memory"),
    ("torch.cuda.memory", "_dump_snapshot", "profiling.memory"),
    ("torch._functorch.config", "activation_memory_budget", "activation_checkpoint.mode = 'memory_budget'"),
    ("torch._functorch.config", "donated_buffer", "pipeline schedules that split the backward pass"),
    ("torch._inductor.config", "_micro_pipeline_tp", "parallelism.async_tensor_parallel"),
    ("torch.distributed._symmetric_memory", "enable_symm_mem_for_group", "parallelism.async_tensor_parallel"),
    ("torch.distributed._functional_collectives", "all_reduce", "tensor and context parallelism"),
    ("torch.distributed._functional_collectives", "all_to_all_single", "expert parallelism"),
    ("torch.distributed._functional_collectives", "AsyncCollectiveTensor", "tensor and context parallelism"),
    ("torch.distributed.tensor._utils", "compute_local_shape_and_global_offset", "checkpoints of DTensors"),
    ("torch.utils._pytree", "tree_map_only", "float8 all-gather and mixed precision"),
    ("torch.distributed.distributed_c10d", "_get_default_store", "the watchdog's heartbeats"),
    ("torch.distributed.distributed_c10d", "_resolve_process_group", "collectives in compiled code"),
    ("torch.distributed.distributed_c10d", "_world.pg_map", "process groups shared between meshes"),
    ("torch.distributed.distributed_c10d", "_abort_process_group", "shutdown after a failure"),
    ("torch.distributed.pipelining", "PipelineStage.backward_maybe_with_nosync", "pipeline schedules that split the backward pass"),
    ("torch.distributed", "ProcessGroup._get_backend", "timeouts of process groups"),
    ("torch.distributed.fsdp", "FSDPModule._get_fsdp_state", "gradient accumulation"),
    ("torch.distributed.elastic.agent.server.local_elastic_agent", "LocalElasticAgent._shutdown", "run.shutdown_timeout"),
    ("torch.distributed.elastic.agent.server.local_elastic_agent", "LocalElasticAgent._monitor_workers", "MAX_RESTARTS"),
)  # fmt: skip

# Collectives that torch.compile traces. torch 2.13 renamed two of them and warns about the old names.
all_reduce = functional.all_reduce
all_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
reduce_scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
all_to_all = functional.all_to_all_single


def wait_tensor(tensor: Tensor) -> Tensor:
    """Waits for the result of one of these collectives. In compiled code they wait themselves; a second wait would hide the
    all-gather from async tensor parallelism."""
    return tensor.wait() if isinstance(tensor, functional.AsyncCollectiveTensor) else tensor


# Public where torch has it; without it, groups are multiplied one by one.
grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", None)

foreach_norm = torch._foreach_norm
foreach_mul_ = torch._foreach_mul_
make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
disabled_torch_function = torch._C._disabled_torch_function_impl


def missing(required: Iterable[tuple[str, str, str]] = REQUIRED) -> list[str]:
    """Returns a sentence for each private API that the installed torch lacks."""
    found = []
    for module, path, use in required:
        try:
            value: Any = importlib.import_module(module)
            for name in path.split("."):
                value = getattr(value, name)
        except (ImportError, AttributeError):
            found.append(f"torch {torch.__version__} has no {module}.{path}, which is required for: {use}")
    return found


def set_activation_memory_budget(budget: float) -> None:
    """Sets the fraction of activations that the compiler keeps. The partitioner has no public setting, and none per region."""
    cast(Any, torch)._functorch.config.activation_memory_budget = budget


def disable_donated_buffers() -> None:
    """Lets the backward pass of compiled code run over parts of the graph twice: its saved tensors must stay intact."""
    cast(Any, torch)._functorch.config.donated_buffer = False


def enable_async_tensor_parallel(group_name: str) -> None:
    """Has the compiler split the collectives of a group and overlap the parts with matmuls. There is no public switch."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    enable_symm_mem_for_group(cast(Any, group_name))
    cast(Any, torch)._inductor.config._micro_pipeline_tp = True


def skip_connections_to_neighbours(stage: Any) -> None:
    """Keeps a pipeline stage from connecting to its neighbours in advance, as torch 2.11 does even on the same rank, which gloo
    cannot: the pipeline connects them itself. Without effect in later versions."""
    stage._get_init_p2p_neighbors_ops = list


def has_gradient_group() -> bool:
    """Whether pipeline stages can exchange gradients on another communicator than activations, as from torch 2.14 on."""
    return hasattr(pipelining.stage, "_build_p2p_direction_groups")


def set_gradient_group(stage: Any, group: dist.ProcessGroup) -> None:
    """Makes a pipeline stage exchange gradients in a group of their own. torch's own setting splits a communicator for it, which
    gloo cannot."""
    stage._upstream_group = group


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@cache
def functions_outlive_their_graph() -> bool:
    """Whether a reference to the graph node of a custom `autograd.Function` keeps the node alive. It does not in torch 2.11."""
    out = _Identity.apply(torch.zeros(1, requires_grad=True))
    node = out.grad_fn
    out.detach_()
    try:
        return node._input_metadata is not None
    except RuntimeError:
        return False


def keep_graph_for_weights(stage: Any) -> None:
    """Keeps the graph of each micro-batch between the two backward passes of a schedule that splits them. torch 2.11 detaches the
    outputs of a stage after the first pass, and for the second one keeps references to nodes, not all of which keep them alive.
    Without effect in later versions."""
    if functions_outlive_their_graph():
        return
    backward = stage.backward_maybe_with_nosync

    def keeping(backward_type: str, arguments: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        outputs = arguments["stage_output"] if backward_type == "input" else ()
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        nodes = [out.view_as(out).grad_fn for out in outputs if out.requires_grad]  # nodes of built-in functions
        gradients, parameter_groups = backward(backward_type, arguments, *args, **kwargs)
        for group in parameter_groups or ():
            group["nodes"] = nodes
        return gradients, parameter_groups

    stage.backward_maybe_with_nosync = keeping


def discard_unreduced_gradients(fsdp_module: Any) -> None:
    """Discards the gradients that an FSDP module keeps for the next backward pass: those that it has not reduced, and those that it
    has reduced over its shards but not over its replicas. There is no public method. torch 2.13 renamed the attribute, and a module
    may have several groups."""
    state = fsdp_module._get_fsdp_state()
    for group in getattr(state, "_fsdp_param_groups", [getattr(state, "_fsdp_param_group", None)]):
        if group is not None:
            group._partial_reduce_output = None
            for parameter in group.fsdp_params:
                if hasattr(parameter, "_unsharded_param"):  # since the first all-gather
                    parameter._unsharded_param.grad = None
                    if parameter.unsharded_accumulated_grad is not None:  # another tensor in older versions
                        parameter.unsharded_accumulated_grad = None


def flash_attention_of_last_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal flash attention whose mask is aligned to the last keys, and which needs no mask tensor. The public function aligns a
    causal mask to the first keys."""
    return cast(Tensor, torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0])


def resolve_process_group(name: str) -> torch.distributed.ProcessGroup:
    """Returns the process group with this name. Compiled code refers to groups by name."""
    return torch.distributed.distributed_c10d._resolve_process_group(cast(Any, name))


def default_store() -> torch.distributed.Store:
    """Returns the key-value store of the job. Another connection to it is needed for use by another thread."""
    return torch.distributed.distributed_c10d._get_default_store()


def exists(group: torch.distributed.ProcessGroup | None) -> bool:
    """Whether a process group has been created and not been destroyed."""
    return group in torch.distributed.distributed_c10d._world.pg_map


def timeout_of(group: torch.distributed.ProcessGroup | None) -> Any:
    """Returns the timeout of a process group for collectives on CPU tensors, or None if its backend has none, as torch's fake one.
    It can be set, but not read, publicly."""
    backend = cast(Any, group)._get_backend(torch.device("cpu"))
    return getattr(getattr(backend, "options", None), "_timeout", None)


def abort_process_groups() -> None:
    """Aborts all process groups: destroying them, the public way, waits for collectives that a failed rank never joins."""
    torch.distributed.distributed_c10d._abort_process_group()


def flight_records() -> dict[str, bytes]:
    """Returns torch's records of the last collectives for `torchfrtrace`, by the backends that keep some."""
    backends = {"flight_nccl": "_dump_nccl_trace", "flight_gloo": "_dump_fr_trace"}
    library = getattr(torch._C, "_distributed_c10d", None)
    return {name: getattr(library, dump)() for name, dump in backends.items() if hasattr(library, dump)}


def local_shape_and_offset(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shape of this rank's shard of a DTensor, and its offset in the full tensor."""
    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)


def disable_compilation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Excludes a function from compiled code, like `torch.compiler.disable`, but without a wrapper around it."""
    return cast(Any, torch)._dynamo.disable(function, wrapping=False)


def use_fast_exp() -> None:
    """Lets the compiler's GPU kernels compute exponentials with the instruction for them, which rounds numbers below 1e-38 to 0."""
    config: Any = importlib.import_module("torch._inductor.config")
    config.use_fast_math = True


def allow_recompilations() -> None:
    """Lets code be compiled for many combinations of shapes and settings."""
    config: Any = importlib.import_module("torch._dynamo.config")
    config.recompile_limit = max(config.recompile_limit, STATIC_RECOMPILE_LIMIT)


def record_memory_history() -> None:
    """Records the allocations of all GPUs from now on, with the Python stack of each."""
    torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS, stacks="python")


def dump_memory_snapshot(path: str) -> None:
    """Writes the recorded allocations, for pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(path)
