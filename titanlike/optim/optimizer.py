"""From gradients to new weights: AdamW, the learning rate, clipping, and the stop before a bad step, or the way past it."""

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.adamw import adamw

from titanlike.distributed import process_group
from titanlike.optim.low_precision_adamw import LowMemoryAdamW
from titanlike.config import UserError
from titanlike.config.sections import Optimizer, Schedule
from titanlike.utils.counter_rng import seed_of
from titanlike.utils.async_d2h import Readback


def build_optimizer(model: nn.Module, section: Optimizer, seed: int = 0) -> torch.optim.Optimizer:
    """AdamW over two groups: matrices and tables are decayed, norms and biases are not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    usual: dict[str, Any] = dict(lr=section.lr, betas=(section.beta1, section.beta2), eps=section.eps)
    if section.state == "full" and not section.stochastic_rounding:
        return AdamW(groups, **usual, fused=section.fused)
    copies: dict[str, str] = getattr(model, "copies", {})  # rounded as their originals are, and so equal for ever
    seeds: dict[Tensor, int] = {}
    if section.stochastic_rounding:
        seeds = {p: seed_of(seed, f"rounding of {copies.get(name, name)}") for name, p in model.named_parameters()}
    return LowMemoryAdamW(groups, **usual, state=section.state, seeds=seeds)


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW`, updating each rank's part of the parameters as plain tensors.

    The update is elementwise, so the numbers are the same. It leaves out DTensor's dispatch, which takes most of a second in the
    first step, and the import of `torch._dynamo`, which takes another and is of no use where nothing is compiled: torch imports
    it when an optimizer is made and when it takes a step, to keep both out of compiled code.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """The arguments of `torch.optim.AdamW`."""
        for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
            method: Any = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
            if method is not None and not hasattr(method, _EXCLUDED):
                setattr(method, _EXCLUDED, _excluded_once_imported(method))
        super().__init__(*arguments, **named)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters."""
        assert closure is None
        for group in self.param_groups:
            # Parameters, gradients, two moments, none of the maxima that only amsgrad has, step counts.
            lists: list[list[Tensor]] = [[] for _ in range(6)]
            self._init_group(group, *lists)
            options: dict[str, Any] = {
                name: group[name] for name in ("amsgrad", "lr", "weight_decay", "eps", "maximize", "foreach", "fused")
            }
            beta1, beta2 = group["betas"]
            local: list[Any] = [[distributed.local_part(tensor) for tensor in tensors] for tensors in lists]
            adamw(*local, beta1=beta1, beta2=beta2, **options)


_EXCLUDED = "__dynamo_disable"  # where torch keeps the method as it is called outside of compiled code


def _excluded_once_imported(method: Any) -> Callable[..., Any]:
    """Calls a method of `Optimizer`, and excludes it from compiled code if something has imported `torch._dynamo`."""

    def call(*arguments: Any, **named: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return method(*arguments, **named)
        excluded = torch._dynamo.disable(method, wrapping=False)
        setattr(method, _EXCLUDED, excluded)
        return excluded(*arguments, **named)

    return call


def learning_rate(step: int, num_steps: int, peak: float, section: Schedule) -> float:
    """The rate of one step, counted from 1. A function of the step alone, so there is no state to save."""
    if step < section.warmup_steps:
        return peak * step / section.warmup_steps
    length = section.decay_steps or num_steps - section.warmup_steps
    progress = (step - (num_steps - length)) / max(length, 1)  # 0 where the decay begins, 1 at the last step
    if progress <= 0 or section.decay == "none":
        return peak
    progress = min(progress, 1.0)
    remaining = {
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        "sqrt": 1.0 - math.sqrt(progress),
    }[section.decay]
    return peak * (section.min_ratio + (1.0 - section.min_ratio) * remaining)


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Use this rate from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = value


class Norms(NamedTuple):
    """How large the gradients are."""

    total: Tensor  # the norm of all of them together
    parts: Tensor  # the norm of this rank's part of each
    names: list[str]


@torch.no_grad()
def gradient_norms(model: nn.Module, pipeline: DeviceMesh | None = None) -> Norms:
    """Norms over all shards, and over the ranks of a pipeline that hold other blocks."""
    copies = getattr(model, "copies", {})  # counted where their original is
    shards: dict[tuple[dist.ProcessGroup, ...], dict[str, Tensor]] = {}  # by the groups of ranks that have the others
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and name not in copies:
            groups = distributed.sharers(parameter.grad)
            shards.setdefault(groups, {})[name] = distributed.local_part(parameter.grad)
    parts = [torch.stack(torch._foreach_norm(list(some.values()))).float() for some in shards.values()]
    squares = [distributed.sum_over(some.square().sum(), groups) for some, groups in zip(parts, shards, strict=True)]
    across = [] if pipeline is None else [pipeline.get_group()]
    total = distributed.sum_over(torch.stack(squares).sum(), across).sqrt()
    return Norms(total, torch.cat(parts), [name for some in shards.values() for name in some])


@torch.no_grad()
def clip_gradients(model: nn.Module, norm: Tensor, max_norm: float) -> None:
    """Scale the gradients down so that their norm, which is `norm` now, is `max_norm` at most."""
    gradients = [distributed.local_part(p.grad) for p in model.parameters() if p.grad is not None]
    torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))


class Guard:
    """Meets steps whose numbers are no longer finite, and tells where they came from. Either such a step stops the run, or its
    update is left out, unless that happens too often.

    To stop, a step is looked at on a GPU while the next one runs, so that neither waits for the other; who saves looks first.
    To leave it out, it is looked at before the optimizer takes it.
    """

    def __init__(
        self,
        non_finite: Literal["stop", "skip"] = "stop",
        *,
        limit: int = 3,
        window: int = 100,
        skipped: Sequence[int] = (),
        tell: Callable[[int, str], None] = lambda step, cause: None,
    ) -> None:
        """To leave out at most `limit` among any `window` successive steps. `skipped` has those that earlier starts of the run
        left out; `tell` is given each new one, and why."""
        self.non_finite = non_finite
        self.limit = limit
        self.window = window
        self.skipped = list(skipped)  # state of the run: without it, one that is killed and resumed could skip for ever
        self.tell = tell
        self.unseen: list[tuple[int, Readback, list[str]]] = []

    def allows(self, step: int, loss: Tensor, local_loss: Tensor, norms: Norms) -> bool:
        """Whether the optimizer may take the step. All ranks are given the same answer, and stop together."""
        if self.non_finite == "skip":
            return self._passes(step, loss, local_loss, norms)
        # `loss` and `norms.total` are the same on all ranks.
        self.unseen.append((step, Readback(loss, local_loss, norms.total, norms.parts), norms.names))
        while self.unseen and (len(self.unseen) > 1 or self.unseen[0][1].here):
            self._look()
        return True

    def catch_up(self) -> None:
        """Look at every step so far."""
        while self.unseen:
            self._look()

    def _look(self) -> None:
        step, numbers, names = self.unseen.pop(0)
        cause = _cause(*numbers.read(), names=names)
        if cause:
            raise _stop(step, cause)

    def _passes(self, step: int, loss: Tensor, local_loss: Tensor, norms: Norms) -> bool:
        # A fault of one rank alone must not set it apart from others that hold the same weights: what one sees, all see.
        assert dist.group.WORLD is not None
        seen = distributed.sum_over(loss + norms.total.to(loss.device), [dist.group.WORLD])
        cause = _cause(*Readback(seen, local_loss, norms.total, norms.parts).read(), names=norms.names)
        if not cause:
            return True
        self.skipped = [*(old for old in self.skipped if old > step - self.window), step]
        if len(self.skipped) > self.limit:
            raise _stop(
                step,
                f"{cause}. It would be number {len(self.skipped)} of the last {self.window} steps to be skipped (steps "
                f"{_list(self.skipped)}), more than training.skip_limit = {self.limit}",
                sound=f"checkpoints from before step {self.skipped[0]}",  # since then the weights may be what is wrong
            )
        self.tell(step, cause)
        return False


def _cause(loss: float, local_loss: float, norm: float, *parts: float, names: Sequence[str]) -> str:
    """Where numbers that are not finite came from; nothing if they are finite. All ranks have to agree on which it is."""
    if math.isfinite(loss + norm):
        return ""
    bad = [name for name, part in zip(names, parts, strict=True) if not math.isfinite(part)]
    reports = distributed.gather((local_loss, bad))
    guilty = [rank for rank, (value, _) in enumerate(reports) if not math.isfinite(value)]
    holders = [rank for rank, (_, names) in enumerate(reports) if names]
    if guilty:
        return f"the loss is {reports[guilty[0]][0]} on rank {_list(guilty)}"
    if holders:
        some = _list(reports[holders[0]][1][:3])
        return f"the loss is finite, but not the gradient of {some}, in the part held by rank {_list(holders)}"
    return f"loss and gradients are finite, but the gradient norm is {norm}: they are too large to add up"


def _stop(step: int, cause: str, sound: str = "earlier checkpoints") -> UserError:
    return UserError(
        f"step {step}: {cause}. Nothing of it was saved; {sound} are sound. "
        "Lower optimizer.lr, lengthen schedule.warmup_steps, or look at the data of that step"
    )


def _list(items: Sequence[object]) -> str:
    return ", ".join(map(str, items))
