"""Records the kernels of one step on a null GPU, in the order in which the host issues them: Triton kernels with the bytes that
inductor counts, other operators with those of their tensors, collectives, and the events that streams record and wait for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._library.custom_ops import OPDEFS
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

WRITES_ONLY = {"copy_", "_foreach_copy_", "fill_", "zero_", "_foreach_zero_"}
READS_NOTHING = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_full", "new_ones"}
READS_ROWS = {"embedding", "gather", "index", "index_select"}  # as many as they return
CHANGES_ROWS = {"index_add_", "index_put_", "_index_put_impl_", "scatter_add_"}  # as many as they are given
NO_KERNEL = ("_local_scalar_dense", "empty", "new_empty", "is_pinned", "record_stream", "resize_", "set_", "wait")
COLLECTIVES = {
    "allgather": "all-gather", "reducescatter": "reduce-scatter", "allreduce": "all-reduce", "alltoall": "all-to-all",
    "broadcast": "broadcast", "send": "send", "recv": "receive",
}  # fmt: skip


class KernelLog(TorchDispatchMode):
    """The kernels of the step between `start` and `stop`."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: dict[str, int] = {}  # as JSON, numbered in their order
        self.calls: list[tuple[str, int, int]] = []  # run, record or wait; a kernel or an event; a stream
        self._numbers: dict[Any, int] = {}  # of streams and events
        self._is_on = self._in_optimizer = False
        self._parameters: dict[str, Any] = {}
        self._observe_launches()
        self._observe_events()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Has compiled functions run as they are while this mode is on."""
        return True

    def start(self, optimizer: Optimizer) -> None:
        """Begins with the next kernel of the thread that calls this, and of its backward passes."""
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        rows = max((each.shape[0] for each in parameters if each.ndim == 2), default=0)
        heads = [each for each in parameters if each.ndim == 2 and each.shape[0] == rows]
        self._parameters = {"vocab": rows, "sizes": _sizes(parameters), "head": _sizes(heads)}
        self._is_on = True
        self.__enter__()

    def stop(self, file: Path) -> None:
        """Ends, and writes what was recorded."""
        self.__exit__(None, None, None)
        self._is_on = False
        found = {"torch": str(torch.__version__), "parameters": self._parameters, "calls": self.calls}
        file.write_text(json.dumps(found | {"kernels": [json.loads(kernel) for kernel in self.kernels]}))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(each) for each in types):
            return NotImplemented  # such as DTensor, whose own operators follow
        kwargs = kwargs or {}
        if definition := OPDEFS.get(func._schema.name):  # a custom operator: its own kernels are what counts
            with self:
                return definition._backend_fns.get("cuda", definition._init_fn)(*args, **kwargs)
        before = len(self.calls)
        out = func(*args, **kwargs)
        if len(self.calls) == before:  # a Triton kernel within it counts itself
            arguments = list(zip(func._schema.arguments, args, strict=False))
            arguments += [(each, kwargs[each.name]) for each in func._schema.arguments if each.name in kwargs]
            self._operator(func, arguments, out)
        return out

    def _operator(self, func: Any, arguments: list[tuple[Any, Any]], out: Any) -> None:
        name = func.overloadpacket.__name__
        given = [(argument, t) for argument, value in arguments for t in _tensors(value)]
        memory = {t.untyped_storage().data_ptr() for _, t in given}
        new = [t for t in _tensors(out) if t.untyped_storage().data_ptr() not in memory]
        if name == "wait_tensor":
            self._event("wait", given[0][1].data_ptr())
        tensors = [*(t for _, t in given), *new]
        if func.namespace in ("c10d", "_c10d_functional"):
            self._collective(func, tensors, arguments)
        elif tensors and not name.startswith(NO_KERNEL) and (new or func._schema.is_mutable):  # else a view
            self._run("operator", name, tensors, bytes=_moved(name, given, new))

    def _collective(self, func: Any, tensors: list[Tensor], arguments: list[tuple[Any, Any]]) -> None:
        name = func.overloadpacket.__name__
        kind = next((kind for part, kind in COLLECTIVES.items() if part in name.replace("_", "")), "")
        if not kind or not tensors:
            return
        group = _group(arguments)
        own, done = f"collectives of {group}", tensors[-1].data_ptr()
        self._event("record", "issued")
        self._event("wait", "issued", own)
        size = max(t.nbytes for t in tensors)
        self._run("collective", name, tensors, own, bytes=size, collective=kind, group=group)
        self._event("record", done, own)
        if func.namespace == "c10d":  # the others return at once, and `wait_tensor` follows
            self._event("wait", done)

    def _run(self, kind: str, name: str, tensors: list[Tensor], stream: str | None = None, **facts: Any) -> None:
        shapes = [(list(t.shape), str(t.dtype).removeprefix("torch.")) for t in tensors]
        key = json.dumps({"kind": kind, "name": name, "tensors": shapes, "optimizer": self._in_optimizer} | facts)
        self.calls.append(("run", self.kernels.setdefault(key, len(self.kernels)), self._stream(stream)))

    def _event(self, what: str, event: Any, stream: Any = None) -> None:
        if self._is_on:
            self.calls.append((what, self._number(event), self._stream(stream)))

    def _stream(self, stream: Any) -> int:
        """Returns the number of a stream, by default of the current one, or of one that NCCL has for a group."""
        return self._number(stream if isinstance(stream, str) else (stream or torch.cuda.current_stream()).stream_id)

    def _number(self, each: Any) -> int:
        return self._numbers.setdefault(each, len(self._numbers))

    def _observe_launches(self) -> None:
        from triton.runtime.jit import JITFunction

        run, launch = CachingAutotuner.run, JITFunction.run

        def run_compiled(tuner: Any, *args: Any, **options: Any) -> Any:
            if len(tuner.compile_results) > len(getattr(tuner, "all_hashes", ())):  # before one of them is chosen
                tuner.all_hashes = [each.kernel.hash for each in tuner.compile_results]
            result = run(tuner, *args, **options)
            if self._is_on and not options.get("benchmark_run"):
                elements = 1
                for each in args:
                    elements *= each if type(each) is int else 1
                facts = {"gigabytes": tuner.inductor_meta.get("kernel_num_gb"), "elements": elements}
                hashes = getattr(tuner, "all_hashes", [])
                self._run("triton", tuner.fn.__name__, _tensors(args), hashes=hashes, **facts)
            return result

        def launch_directly(function: Any, *args: Any, **options: Any) -> Any:
            kernel = launch(function, *args, **options)
            if self._is_on and not options["warmup"]:
                self._run("triton", function.__name__, _tensors((args, options)), hashes=[kernel.hash])
            return kernel

        tuners: Any = CachingAutotuner
        tuners.run, JITFunction.run = run_compiled, launch_directly
        register_optimizer_step_pre_hook(lambda *_: setattr(self, "_in_optimizer", True))
        register_optimizer_step_post_hook(lambda *_: setattr(self, "_in_optimizer", False))

    def _observe_events(self) -> None:
        def observed(what: str, call: Callable[..., None]) -> Callable[..., None]:
            def observe(event: torch.cuda.Event, stream: torch.cuda.Stream | None = None) -> None:
                call(event, stream)
                self._event(what, event, stream)

            return observe

        event: Any = torch.cuda.Event
        event.record, event.wait = observed("record", event.record), observed("wait", event.wait)


def _sizes(parameters: list[Tensor]) -> list[int]:
    """Returns the numbers of elements, of all ranks and of this one."""
    local: list[Tensor] = [getattr(each, "_local_tensor", each) for each in parameters]
    return sorted({each.numel() for each in (*parameters, *local)})


def _tensors(value: Any) -> list[Tensor]:
    """Returns the tensors in the memory of a device."""
    return [t for t in tree_leaves(value) if isinstance(t, Tensor) and t.device.type == "cuda"]


def _moved(name: str, given: list[tuple[Any, Tensor]], new: list[Tensor]) -> int:
    """Returns the bytes that an operator reads and writes."""
    written = sum(t.nbytes for t in new)
    if name in READS_ROWS:
        return 2 * written + sum(t.nbytes for _, t in given[1:])
    if name in CHANGES_ROWS:
        return sum(t.nbytes for _, t in given[1:]) + 2 * given[-1][1].nbytes
    read = 0
    for argument, t in given:
        # Fused optimizers declare that they change gradients, and do not.
        changes = argument.alias_info is not None and argument.alias_info.is_write and argument.name != "grads"
        written += t.nbytes if changes else 0
        only_written = changes and (argument.is_out or name in WRITES_ONLY)
        read += 0 if only_written or name in READS_NOTHING else t.nbytes
    return read + written


def _group(arguments: list[tuple[Any, Any]]) -> tuple[str, int]:
    """Returns the description and the number of ranks of a collective's process group."""
    value = next(value for argument, value in arguments if "group" in argument.name and "size" not in argument.name)
    resolve = dist.distributed_c10d._resolve_process_group if isinstance(value, str) else dist.ProcessGroup.unbox
    group = resolve(value)
    return group.group_desc, group.size()
