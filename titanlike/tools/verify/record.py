"""Records what one process, a rank of a mesh, or compiled code computes of any module, for `titanlike verify`."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from titanlike.config import UserError
from titanlike.tools.verify import comparison as phases
from titanlike.tools.verify.comparison import ProcessRecord
from titanlike.utils import compat
from titanlike.utils.rng import generator_states, restore_generators, seed_generators

# Dimensions of the mesh along which ranks have different rows of a batch by default, and those along which they have the same.
DATA = ("replicate", "shard", "data", "dp", "ddp", "fsdp", "dp_replicate", "dp_shard")
MODEL = ("tensor", "tp", "pipeline", "pp", "model", "mp")
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")  # in the names of wrapped parameters
DROPOUTS = tuple(
    name for name in vars(F) if name.endswith(("dropout", "dropout1d", "dropout2d", "dropout3d")) and name[0] != "_"
)


@dataclass(frozen=True)
class Functions:
    """What is verified. A function that has a parameter `mesh` gets the mesh, which is None in one process.

    Args:
        model: returns the module with its initial weights, in one process and on every rank.
        parallelize: `parallelize(model, mesh)` applies the plan, in place or by returning another module. Without it, a
            transformers model gets its own tensor-parallel plan.
        batch: `batch(step)` returns the global batch: a tensor, or a tuple or dict of tensors.
        shard_batch: `shard_batch(batch, mesh)` returns the part of this rank. By default ranks of `DATA` dimensions get
            consecutive rows.
        loss: `loss(model, batch)`; by default the loss that the model returns, or the mean of the squares of its output.
        backward: `backward(model, batch)` computes gradients, and returns the loss or None: for micro-batches and pipelines. By
            default, `loss(model, batch).backward()`.
        clip: `clip(model)` clips the gradients and returns their norm. By default, they are not clipped.
        optimizer: `optimizer(model)`; by default AdamW, with an `eps` that does not amplify rounding.
        after_step: `after_step(model, optimizer, step)`, for example to save and load a checkpoint.
        compile: `compile(model)` compiles the module, in place or by returning another module. By default, each of its blocks.
    """

    model: Callable[..., nn.Module]
    batch: Callable[..., Any]
    parallelize: Callable[..., Any] | None = None
    shard_batch: Callable[..., Any] | None = None
    loss: Callable[..., Tensor] | None = None
    backward: Callable[..., Tensor | None] | None = None
    clip: Callable[..., Any] | None = None
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    after_step: Callable[..., Any] | None = None
    compile: Callable[..., Any] | None = None


def batch_dimensions(functions: Functions, sizes: Mapping[str, int]) -> list[str]:
    """Returns the dimensions whose ranks have different parts of the batch."""
    others = [name for name in sizes if name not in (*DATA, *MODEL)]
    if others and functions.shard_batch is None:
        raise UserError(
            f"layout {others[0]}={sizes[others[0]]}: define shard_batch(batch, mesh), which returns the part of the batch of this "
            f"rank; only {', '.join(DATA)} (different rows) and {', '.join(MODEL)} (the same rows) have a default"
        )
    return [name for name in sizes if name not in MODEL]


def record(
    functions: Functions,
    mesh: DeviceMesh | None = None,
    *,
    steps: int = 3,
    seed: int = 0,
    mode: Literal["layout", "eager", "compiled"] = "layout",
) -> ProcessRecord:
    """Trains some steps, in one process or as a rank of the mesh, and records what is computed. All ranks call this together.

    Args:
        mode: `eager` and `compiled` record what `verify --compile` compares: a step accumulates two micro-batches, the last step
            has fewer rows, and a further one has dropout.
    """
    seed_generators(seed)
    model = _call(functions.model, mesh=mesh)
    _check("the function that returns the model", model, nn.Module, "a torch.nn.Module")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UserError("the model has parameters on the meta device; return it with its initial weights, on the CPU")
    if mode == "compiled" and functions.compile:
        model = _call(functions.compile, model, mesh=mesh) or model
        _check("compile(model)", model, nn.Module, "a torch.nn.Module or None")
    done = ProcessRecord()
    if mesh is not None:
        done.coordinates = dict(zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), strict=True))
        parallelize = functions.parallelize or apply_tp_plan
        model = parallelize(model, mesh) or model
        _check("parallelize(model, mesh)", model, nn.Module, "a torch.nn.Module or None")
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums
    trainer = _Trainer(functions, model, mesh, seed)
    done.ties = trainer.ties()
    done.tensors[phases.INITIAL, 0] = trainer.weights()
    done.tensors[phases.INITIAL_BUFFERS, 0] = trainer.buffers()
    with _without_dropout():
        if mesh is None and mode != "compiled":
            trainer.check_deterministic()
        for step in range(1, steps + 1):
            model.zero_grad()
            trainer.has_fewer_rows = mode != "layout" and 1 < step == steps
            with trainer.observed(done, mode) if step == 1 else nullcontext():
                loss = trainer.backward(step)
            done.tensors[phases.LOSS, step] = {} if loss is None else {"loss": _full(loss).mean()}
            done.tensors[phases.GRADIENTS, step] = trainer.gradients()
            if mode != "layout":
                trainer.backward(steps + step)
                done.tensors[phases.ACCUMULATED, step] = trainer.gradients()
            if functions.clip:
                norm = _call(functions.clip, model, mesh=mesh)
                _check("clip(model)", norm, Tensor | float, "the norm of the gradients, a tensor with one element")
                done.tensors[phases.NORM, step] = {"norm": _full(torch.as_tensor(norm)).mean()}
            trainer.optimizer.step()
            done.tensors[phases.WEIGHTS, step] = trainer.weights()
            if functions.after_step:
                _call(functions.after_step, model, trainer.optimizer, step, mesh=mesh)
            done.tensors[phases.STATE, step] = trainer.state()
    done.tensors[phases.BUFFERS, 0] = trainer.buffers()
    if mode != "layout":
        trainer.record_with_dropout(done)
    elif mesh is not None:
        with _recorded_dropout(model, done):
            trainer.backward(1)
    return done


class _Trainer:
    """A model with its optimizer, and its tensors by names that do not depend on wrappers."""

    def __init__(self, functions: Functions, model: nn.Module, mesh: DeviceMesh | None, seed: int) -> None:
        self.functions, self.model, self.mesh, self.seed = functions, model, mesh, seed
        self.has_fewer_rows = False
        self.parameters = {self._name(name): each for name, each in model.named_parameters()}
        # Neither fused nor foreach: plans leave some parameters as plain tensors beside DTensors.
        self.optimizer = (
            _call(functions.optimizer, model, mesh=mesh)
            if functions.optimizer
            else torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2, eps=1e-3, foreach=False)
        )
        _check("optimizer(model)", self.optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer")

    def _name(self, name: str) -> str:
        if isinstance(self.model, nn.parallel.DistributedDataParallel):
            name = name.removeprefix("module.")
        return ".".join(part for part in name.split(".") if part not in WRAPPERS)

    def ties(self) -> dict[str, str]:
        """Returns the further names of parameters, each with the first one."""
        first = {id(each): name for name, each in self.parameters.items()}
        names = {
            self._name(name): first[id(each)] for name, each in self.model.named_parameters(remove_duplicate=False)
        }
        return {name: canonical for name, canonical in names.items() if name != canonical}

    def weights(self) -> dict[str, Tensor]:
        return {name: _full(each) for name, each in self.parameters.items()}

    def gradients(self) -> dict[str, Tensor]:
        # Of a parameter that a rank does not use, zeros: all ranks take part in assembling a DTensor.
        return {
            name: _full(torch.zeros_like(each) if each.grad is None else each.grad)
            for name, each in self.parameters.items()
        }

    def buffers(self) -> dict[str, Tensor]:
        return {self._name(name): _full(each) for name, each in self.model.named_buffers(remove_duplicate=False)}

    def state(self) -> dict[str, Tensor]:
        return {
            f"{name}: {key}": _full(value)
            for name, each in self.parameters.items()
            for key, value in sorted(self.optimizer.state.get(each, {}).items())
            if isinstance(value, Tensor) and value.ndim
        }

    def batch(self, step: int) -> Any:
        """Returns the batch of this rank. The global batch is the same on all ranks, even if it is drawn at random."""
        with _seeded(1_000 * (self.seed + 1) + step):
            batch = _call(self.functions.batch, step, mesh=self.mesh)
        if self.mesh is None:
            return _half(batch) if self.has_fewer_rows else batch
        return (self.functions.shard_batch or shard_rows)(batch, self.mesh)

    def loss(self, batch: Any) -> Tensor:
        if self.functions.loss:
            loss = _call(self.functions.loss, self.model, batch, mesh=self.mesh)
            _check("loss(model, batch)", loss, Tensor, "a tensor with one element")
            return _one_number(loss)
        if isinstance(batch, Mapping):
            output = self.model(**batch)
        else:
            output = self.model(*batch) if isinstance(batch, tuple | list) else self.model(batch)
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if isinstance(loss, Tensor):
            return _one_number(loss)
        tensor = next((each for each in _tensors(output) if each.is_floating_point()), None)
        if tensor is None:
            kind = f"a tensor of {output.dtype}" if isinstance(output, Tensor) else type(output).__name__
            raise UserError(
                f"the model returned {kind}, and no floating-point tensor; return one, or define "
                "loss(model, batch), which returns the loss"
            )
        return tensor if tensor.ndim == 0 else tensor.float().square().mean()

    def backward(self, step: int) -> Tensor | None:
        batch = self.batch(step)
        if self.functions.backward:
            loss = _call(self.functions.backward, self.model, batch, mesh=self.mesh)
            _check("backward(model, batch)", loss, Tensor | None, "the loss, a tensor with one element, or None")
            return loss
        loss = self.loss(batch)
        if not loss.requires_grad:
            raise UserError(
                "the loss does not depend on the parameters; return one that does, or define backward(model, batch)"
            )
        loss.backward()
        return loss.detach()

    def check_deterministic(self) -> None:
        """Raises `UserError` if the model draws random numbers itself: no layout would agree with one process."""
        if self.functions.backward:
            return
        buffers = {name: each.clone() for name, each in self.model.named_buffers()}
        losses = []
        for seed in (0, 1):
            with _seeded(seed), torch.no_grad():
                losses.append(float(self.loss(self.batch(1))))
            for name, each in self.model.named_buffers():
                each.copy_(buffers[name])
        if losses[0] != losses[1]:
            raise UserError(
                f"the loss of one process depends on the random state ({losses[0]:.6g}, then {losses[1]:.6g}): verify disables "
                "torch.nn.functional.dropout and its variants only; disable other noise in the function that returns the model"
            )

    def record_with_dropout(self, done: ProcessRecord) -> None:
        """Records the loss and the gradients of a step with dropout, if the model draws random numbers in it."""
        torch.compiler.reset()  # code that was compiled without dropout
        self.model.zero_grad()
        self.has_fewer_rows = False
        with _seeded(self.seed):
            before = torch.get_rng_state()
            loss = self.backward(1)
            if not torch.equal(before, torch.get_rng_state()):
                found = {} if loss is None else {phases.LOSS: _full(loss).mean()}
                done.tensors[phases.WITH_DROPOUT, 0] = found | self.gradients()

    @contextmanager
    def observed(self, done: ProcessRecord, mode: str) -> Iterator[None]:
        """Records the first output of each module, and the order of modules and parameters."""
        outputs = done.tensors.setdefault((phases.OUTPUTS, 1), {})
        handles = []

        def started(name: str, module: nn.Module) -> None:
            done.order.extend(f"{name}.{each}".lstrip(".") for each, _ in module.named_parameters(recurse=False))

        def finished(name: str, output: Any) -> None:
            tensors = [each for each in _tensors(output) if each.is_floating_point()]
            if name not in outputs and tensors:
                outputs[name] = _full(max(tensors, key=Tensor.numel))  # the logits rather than the loss
                done.order.append(name)

        skipped = _traced(self.model) if mode == "compiled" else set()
        for path, module in self.model.named_modules():
            if module in skipped:
                continue
            is_wrapped = path == "module" and isinstance(self.model, nn.parallel.DistributedDataParallel)
            name = "" if module is self.model or is_wrapped else self._name(path)
            handles.append(module.register_forward_pre_hook(lambda module, _, name=name: started(name, module)))
            handles.append(module.register_forward_hook(lambda _, __, output, name=name: finished(name, output)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        before = ""
        # Parameters that no call of their own module uses follow the one that is registered before.
        for name in self.parameters:
            if name not in done.order:
                done.order.insert(done.order.index(before) + 1 if before in done.order else 0, name)
            before = name


def _traced(model: nn.Module) -> set[nn.Module]:
    """Returns the modules inside of compiled code, which would trace their hooks."""
    traced: set[nn.Module] = set()
    for module in model.modules():
        own = vars(module)
        if own.get("_compiled_call_impl") is not None:  # of `module.compile()`
            traced.update(module.modules())
        elif "forward" in own or "_orig_mod" in own.get(
            "_modules", {}
        ):  # a compiled forward, or `torch.compile(module)`
            traced.update(child for child in module.modules() if child is not module)
    return traced


def _half(batch: Any) -> Any:
    """Returns the first half of the rows of a batch, if it has four rows or more."""
    sizes = {len(tensor) for tensor in _tensors(batch) if tensor.ndim}
    rows = sizes.pop() // 2 if len(sizes) == 1 else 0
    return (
        compat.tree_map_only(Tensor, lambda tensor: tensor[:rows] if tensor.ndim else tensor, batch)
        if rows > 1
        else batch
    )


def shard_rows(batch: Any, mesh: DeviceMesh) -> Any:
    """Returns the rows of this rank: ranks of the dimensions `DATA` have consecutive parts of the batch, outer dimensions first."""
    part, parts = 0, 1
    for number, name in enumerate(mesh.mesh_dim_names or ()):
        if name in DATA:
            part, parts = part * mesh.size(number) + mesh.get_local_rank(number), parts * mesh.size(number)

    def shard(tensor: Tensor) -> Tensor:
        if tensor.ndim == 0:
            return tensor
        if len(tensor) % parts:
            raise UserError(
                f"a batch of {len(tensor)} rows is not divisible by the {parts} ranks that share it; return another number of rows "
                "from batch(step), or define shard_batch(batch, mesh)"
            )
        return tensor.chunk(parts)[part]

    return compat.tree_map_only(Tensor, shard, batch)


def apply_tp_plan(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Distributes a transformers model under its own tensor-parallel plan, as `from_pretrained` does with a `DistributedConfig`."""
    if not hasattr(model, "maybe_distribute_model"):
        raise UserError(
            "define parallelize(model, mesh), which applies the plan; only a transformers model has one of its own (tp_plan)"
        )
    if mesh.ndim != 1:
        raise UserError("the tp_plan of a transformers model has one dimension, such as --layout tensor=2")
    from transformers.distributed import DistributedConfig

    first: dict[int, str] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if first.setdefault(id(parameter), name) != name:  # tied again below, as after loading
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, nn.Parameter(parameter.detach().clone()))
    kind: Any = type(model)
    config, _, meshes = kind.prepare_distribute_model(DistributedConfig(tp_size=mesh.size()))
    model = kind.maybe_distribute_model(model, config, meshes)
    cast(Any, model).tie_weights()
    return model


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    compat.tree_map_only(Tensor, found.append, tree)
    return found


def _one_number(loss: Tensor) -> Tensor:
    if loss.numel() != 1 or not loss.is_floating_point():
        raise UserError(
            f"the loss has the shape {tuple(loss.shape)} and is {loss.dtype}; return one floating-point number"
        )
    return loss


def _check(function: str, value: Any, kind: Any, expected: str) -> None:
    """Raises `UserError` if a function of the file returned something else than expected."""
    if not isinstance(value, kind):
        raise UserError(f"{function} returned {type(value).__name__}; return {expected}")


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seeds the generators of Python, NumPy and torch, and restores their states afterwards."""
    states = generator_states()
    seed_generators(seed)
    try:
        yield
    finally:
        restore_generators(states)


def _call(function: Callable[..., Any], *arguments: Any, mesh: DeviceMesh | None) -> Any:
    takes_mesh = "mesh" in inspect.signature(function).parameters
    return function(*arguments, mesh=mesh) if takes_mesh else function(*arguments)


def _full(tensor: Tensor) -> Tensor:
    """Returns a copy of the full tensor. Copies of a replicated DTensor may differ: it is this rank's."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.to("cpu", copy=True)


@contextmanager
def _without_dropout() -> Iterator[None]:
    """Disables dropout."""

    def identity(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return input

    attention = F.scaled_dot_product_attention

    def without(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, *a: Any, **k: Any
    ) -> Tensor:
        return attention(query, key, value, attn_mask, 0.0, *a, **k)

    changed: dict[str, Any] = dict.fromkeys(DROPOUTS, identity) | {"scaled_dot_product_attention": without}
    with mock.patch.multiple(F, **changed):
        yield


@contextmanager
def _recorded_dropout(model: nn.Module, done: ProcessRecord) -> Iterator[None]:
    """Records the input and the mask of each dropout. A mask is what dropout makes of ones, since its input may have zeros."""
    masks: dict[str, Tensor] = {}
    running: list[str] = []

    def add(input: Tensor, draw: Callable[[], Tensor]) -> None:
        name = f"{running[-1] if running else 'dropout'} #{len(masks)}"
        with torch.random.fork_rng():  # the call that is recorded draws the same numbers
            masks[name] = _local(draw())
        done.dropout_inputs[name] = _local(input)

    def recorded(dropout: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def record(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
            if 0.0 < p < 1.0 and training:
                add(input, lambda: dropout(torch.ones_like(input), p, training))
            return dropout(input, p, training)

        return record

    attention = F.scaled_dot_product_attention

    def record_attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, *a: Any, **k: Any
    ) -> Tensor:
        if 0.0 < dropout_p < 1.0 and not isinstance(query, DTensor):
            # Equal scores, and the unit matrix as values: the output is the mask.
            units = torch.eye(key.shape[-2], dtype=value.dtype).expand(*value.shape[:-1], -1)
            add(query, lambda: attention(torch.zeros_like(query), key, units, attn_mask, dropout_p, *a, **k))
        return attention(query, key, value, attn_mask, dropout_p, *a, **k)

    def finished(*_: Any) -> None:
        running.pop()

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda _, __, name=name: running.append(name)))
        handles.append(module.register_forward_hook(finished, always_call=True))
    changed: dict[str, Any] = {name: recorded(getattr(F, name)) for name in DROPOUTS}
    changed["scaled_dot_product_attention"] = record_attention
    try:
        with mock.patch.multiple(F, **changed):
            yield
    finally:
        for handle in handles:
            handle.remove()
    if masks:
        done.tensors[phases.DROPOUT, 0] = masks


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()
