"""Records one process on the null device: counters at each optimizer step, and where in Python the host synchronizes.

`process/sitecustomize.py` starts it in every Python process. It imports PyTorch only when the process has launched a kernel.
"""

import atexit
import contextlib
import ctypes
import json
import os
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

_Callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
_FIRST_LAUNCH = b"first launch"
_STEP_OF_LEDGER = 4


class Recorder:
    """Counters of this process. A step of training is the time from one `step()` of the first optimizer to its next."""

    def __init__(self, device: ctypes.CDLL) -> None:
        self._device = device
        device.null_gpu_counters.restype = ctypes.c_void_p
        self._libc = ctypes.CDLL(None)
        self._libc.free.argtypes = [ctypes.c_void_p]
        self._callback = _Callback(self._on_event)  # kept: the device has its address
        self._optimizer: Callable[[], object] = lambda: None
        self.steps: list[dict[str, Any]] = []
        self.locations: dict[str, int] = {}  # of synchronizations
        self._log: Any = None

    def start(self) -> None:
        self._device.null_gpu_set_callback(self._callback)
        atexit.register(self.stop)
        process, exit_at_once = os.getpid(), os._exit

        def stop_and_exit(status: int) -> NoReturn:
            if os.getpid() == process:  # a fork has the counters of its parent
                self.stop()
            exit_at_once(status)

        os._exit = stop_and_exit

    def _on_event(self, event: bytes) -> None:
        if event == _FIRST_LAUNCH:
            from torch.optim.optimizer import register_optimizer_step_post_hook

            register_optimizer_step_post_hook(self._on_optimizer_step)
            _exchange_objects(self._device)
            if "NULL_GPU_LEDGER" in os.environ:
                from titanlike.tools.null_gpu import kernel_log

                self._log = kernel_log.KernelLog()
            if "titanlike.models.registry" in sys.modules:
                from titanlike.tools.null_gpu import balanced_routing

                balanced_routing.balance()
            return
        place = f"{event.decode()} at {_place()}"
        self.locations[place] = self.locations.get(place, 0) + 1

    def _on_optimizer_step(self, optimizer: object, *_: object) -> None:
        if self._optimizer() is None:
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer() is optimizer:
            if self._log and len(self.steps) == _STEP_OF_LEDGER - 1:
                self._log.stop(Path(os.environ["NULL_GPU_FOLDER"], f"ledger-{os.environ.get('RANK', 0)}.json"))
            self._mark()
            if self._log and len(self.steps) == _STEP_OF_LEDGER - 1:
                self._log.start(optimizer)

    def _mark(self) -> None:
        end = _clocks()
        counters = self._counters()
        import torch

        counters["allocated"] = torch.cuda.memory_allocated()
        self.steps.append(counters | {"end": end, "start": _clocks()})

    def _counters(self) -> dict[str, Any]:
        address = self._device.null_gpu_counters()
        text = ctypes.string_at(address)
        self._libc.free(address)
        return json.loads(text) | {"locations": dict(self.locations)}

    def stop(self) -> None:
        """Writes the record. Processes without a launch have none."""
        self._device.null_gpu_set_callback(_Callback(0))
        end = self._counters()
        if not any(kernel[2] for kernel in end["kernels"]):
            return
        record = {
            "process": os.getpid(),
            "rank": int(os.environ.get("RANK", 0)),
            "command": sys.orig_argv[1:],
            "steps": self.steps,
            "end": end,
            **_torch_counters(),
        }
        folder = Path(os.environ["NULL_GPU_FOLDER"])
        (folder / f"process-{os.getpid()}.json").write_text(json.dumps(record))


def _clocks() -> tuple[float, float]:
    """Returns a time, and the CPU time of the threads that launch kernels: the main thread and those of autograd."""
    threads = [os.getpid()]
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            if (thread / "comm").read_text().startswith("pt_autograd"):
                threads.append(int(thread.name))
    # Linux has a clock for each thread, whose number is made of the thread's.
    return time.perf_counter(), sum(time.clock_gettime(~thread << 3 | 6) for thread in threads)


def _torch_counters() -> dict[str, Any]:
    import torch

    memory = torch.cuda.memory_stats() if torch.cuda.is_initialized() else {}
    found: dict[str, Any] = {
        "allocated_peak": memory.get("allocated_bytes.all.peak", 0),
        "reserved_peak": memory.get("reserved_bytes.all.peak", 0),
        "allocator_retries": memory.get("num_alloc_retries", 0),
        "reserved_by_stream": _reserved_by_stream() if memory else [],
    }
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None:
        counters = dynamo.counters
        found["graph_breaks"] = dict(counters["graph_break"])
        found["graphs"] = counters["stats"].get("unique_graphs", 0)
        found["operators"] = counters["stats"].get("calls_captured", 0)
    return found


def _reserved_by_stream() -> list[int]:
    """Returns the reserved bytes of each stream at the end: memory of one is not used for another."""
    import torch

    sizes: dict[int, int] = {}
    for segment in torch.cuda.memory_snapshot():
        sizes[segment["stream"]] = sizes.get(segment["stream"], 0) + segment["total_size"]
    return [size for _, size in sorted(sizes.items())]


def _exchange_objects(device: ctypes.CDLL) -> None:
    """Has the functions that exchange objects between ranks compute the sizes of objects on the host, as the null device gives
    zeros, and has the device move what they exchange."""
    import torch
    import torch.distributed as dist
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten
    computed = {aten.add.Tensor, aten.cat.default, aten.gt.Tensor, aten.lt.Tensor, aten.sum.default}

    class OnHost(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function not in computed:
                return function(*args, **kwargs or {})
            moved = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, args)
            return function(*moved).to(torch.utils._pytree.tree_leaves(args)[0].device)

    def on_host(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            device.null_gpu_exchange(1)
            try:
                with OnHost():
                    return function(*arguments, **options)
            finally:
                device.null_gpu_exchange(-1)

        return call

    for name in (
        "all_gather_object",
        "broadcast_object_list",
        "gather_object",
        "recv_object_list",
        "scatter_object_list",
        "send_object_list",
    ):
        wrapped = on_host(getattr(dist, name))
        setattr(dist, name, wrapped)
        setattr(dist.distributed_c10d, name, wrapped)


def _place() -> str:
    """Returns the innermost line outside of PyTorch that is running in this thread, and the line of PyTorch that it calls."""
    frame: FrameType | None = sys._getframe(2)
    inner = None
    while frame is not None:
        name = frame.f_code.co_filename
        if f"{os.sep}torch{os.sep}" not in name and not name.startswith("<"):
            called = f" ({inner})" if inner else ""
            return f"{_relative(name)}:{frame.f_lineno} {frame.f_code.co_name}{called}"
        inner = inner or f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return inner or "a thread of PyTorch"


def _relative(name: str) -> str:
    try:
        return str(Path(name).relative_to(Path.cwd()))
    except ValueError:
        return name.split("site-packages/")[-1]


def start() -> None:
    """Starts the record of this process, if the null device is loaded."""
    device = ctypes.CDLL(None)
    if hasattr(device, "null_gpu_set_callback"):
        Recorder(device).start()
