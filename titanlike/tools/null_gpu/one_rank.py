"""Runs rank 0 of a job whose other ranks are absent: every message from them is what this rank itself sends, or nothing.

`process/sitecustomize.py` calls it before the program starts. The store of the job is one in memory, and the backend `fake` of
PyTorch replaces gloo. NCCL's calls reach the null device, for which the variable is NULL_GPU_RANKS.
"""

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from typing import Any

MODULE = "torch.distributed.distributed_c10d"


def start() -> None:
    """Sets the variables of a launcher, and has the functions that create process groups wait for nobody."""
    ranks = os.environ["NULL_GPU_RANKS"]
    os.environ |= {"RANK": "0", "WORLD_SIZE": ranks, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # not used
    os.environ["TORCH_NCCL_RANKS_PER_ROOT"] = ranks  # one root, this rank: it waits for the identifiers of others
    sys.meta_path.insert(0, _Import())


class _Import:
    """Changes the module of process groups when the program imports it, which may set variables for PyTorch before."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_change(module: Any) -> None:
            execute(module)
            _change(module)

        spec.loader.exec_module = execute_and_change
        return spec


def _change(module: Any) -> None:
    init_process_group, new_group = module.init_process_group, module.new_group

    def init(backend: str | None = None, *_: Any, timeout: Any = None, **__: Any) -> None:
        import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers the backend "fake"
        from torch.distributed import HashStore

        _use_shapes_of_stages()
        options = {"store": HashStore(), "rank": 0, "world_size": int(os.environ["NULL_GPU_RANKS"])}
        init_process_group(_without_gloo(backend), timeout=timeout, **options)

    def create(*arguments: Any, backend: str | None = None, **options: Any) -> Any:
        return new_group(*arguments, backend=_without_gloo(backend), **options)

    module.init_process_group, module.new_group = init, create
    module._get_split_source = lambda *_: None  # a communicator is not split: NCCL would ask all ranks


def _without_gloo(backend: str | None) -> str | None:
    return None if backend is None else backend.replace("gloo", "fake")


def _use_shapes_of_stages() -> None:
    """Has pipeline stages use the shapes that they are built with. PyTorch 2.14 asks the other ranks whether all have them."""
    from torch.distributed.pipelining import schedules, stage

    if not hasattr(stage, "InferenceMode"):
        return

    def use(_: Any, stages: Any, *__: Any) -> None:
        for each in stages:
            each._inference_mode = stage.InferenceMode.STATIC

    schedules._PipelineSchedule._warmup_p2p = use  # type: ignore[method-assign, assignment]
