"""Detection of steps whose loss or gradients are not finite: stop the run, or skip the update."""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch.distributed as dist
from torch import Tensor

from titanlike.config import UserError
from titanlike.distributed import collectives, process_group
from titanlike.optim.clipping import Norms
from titanlike.utils.async_d2h import AsyncD2H


class NonFiniteGuard:
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
        self.unseen: list[tuple[int, AsyncD2H, list[str]]] = []

    def should_step(self, step: int, loss: Tensor, local_loss: Tensor, norms: Norms) -> bool:
        """Whether the optimizer may take the step. All ranks are given the same answer, and stop together."""
        if self.non_finite == "skip":
            return self._passes(step, loss, local_loss, norms)
        # `loss` and `norms.total` are the same on all ranks.
        self.unseen.append((step, AsyncD2H(loss, local_loss, norms.total, norms.parts), norms.names))
        while self.unseen and (len(self.unseen) > 1 or self.unseen[0][1].here):
            self._look()
        return True

    def flush(self) -> None:
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
        seen = collectives.all_reduce_sum(loss + norms.total.to(loss.device), [dist.group.WORLD])
        cause = _cause(*AsyncD2H(seen, local_loss, norms.total, norms.parts).read(), names=norms.names)
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
    reports = process_group.all_gather_object((local_loss, bad))
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
