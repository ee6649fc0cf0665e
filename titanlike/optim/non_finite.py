"""Detection of steps with a non-finite loss or gradient norm: stops the run, or skips the update."""

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
    """Detects non-finite steps and reports the rank and the parameters at fault.

    `stop` raises an error. On a GPU it checks a step while the next one runs, so that host and device do not wait for each other;
    call `flush` before a checkpoint. `skip` checks a step before the optimizer update, and skips the update unless that happens
    too often.
    """

    def __init__(
        self,
        non_finite: Literal["stop", "skip"] = "stop",
        limit: int = 3,
        window: int = 100,
        *,
        skipped: Sequence[int] = (),
        on_skip: Callable[[int, str], None] = lambda step, cause: None,
    ) -> None:
        """Skips at most `limit` of any `window` consecutive steps. `skipped` lists the steps skipped before a resume. Each skip
        calls `on_skip(step, cause)`."""
        self.non_finite = non_finite
        self.limit = limit
        self.window = window
        self.skipped = list(
            skipped
        )  # checkpointed: otherwise a run that is killed and resumed could skip without limit
        self.on_skip = on_skip
        self.pending: list[tuple[int, AsyncD2H, list[str]]] = []

    def should_step(self, step: int, loss: Tensor, local_loss: Tensor, norms: Norms) -> bool:
        """Whether to apply the optimizer update. The result, or the error, is the same on all ranks."""
        if self.non_finite == "skip":
            return self._check_before_update(step, loss, local_loss, norms)
        # `loss` and `norms.total` are the same on all ranks.
        values = AsyncD2H(loss, local_loss, norms.total, norms.parts)
        self.pending.append((step, values, norms.names))
        self.flush(keep=0 if values.is_on_host else 1)
        return True

    def flush(self, keep: int = 0) -> None:
        """Checks all pending steps but the last `keep`."""
        while len(self.pending) > keep:
            step, values, names = self.pending.pop(0)
            cause = _cause(*values.read(deferred=keep > 0), names=names)
            if cause:
                raise _error(step, cause)

    def _check_before_update(self, step: int, loss: Tensor, local_loss: Tensor, norms: Norms) -> bool:
        # A fault of a single rank must not make its decision differ from that of its replicas: all ranks check the same sum.
        assert dist.group.WORLD is not None
        total = collectives.all_reduce_sum(loss + norms.total.to(loss.device), [dist.group.WORLD])
        cause = _cause(*AsyncD2H(total, local_loss, norms.total, norms.parts).read(), names=norms.names)
        if not cause:
            return True
        self.skipped = [*(old for old in self.skipped if old > step - self.window), step]
        if len(self.skipped) > self.limit:
            raise _error(
                step,
                f"{cause}. It would be skip number {len(self.skipped)} in the last {self.window} steps (steps "
                f"{_join(self.skipped)}), more than training.skip_limit = {self.limit}",
                valid=f"checkpoints from before step {self.skipped[0]}",  # the weights may be at fault since then
            )
        self.on_skip(step, cause)
        return False


def _cause(loss: float, local_loss: float, norm: float, *parts: float, names: Sequence[str]) -> str:
    """Returns the origin of non-finite values, "" if all are finite. Collective: `loss + norm` is the same on all ranks."""
    if math.isfinite(loss + norm):
        return ""
    bad = [name for name, part in zip(names, parts, strict=True) if not math.isfinite(part)]
    reports = process_group.all_gather_object((local_loss, bad))
    bad_loss = [rank for rank, (value, _) in enumerate(reports) if not math.isfinite(value)]
    bad_gradients = [rank for rank, (_, names) in enumerate(reports) if names]
    if bad_loss:
        return f"the loss is {reports[bad_loss[0]][0]} on rank {_join(bad_loss)}"
    if bad_gradients:
        names = reports[bad_gradients[0]][1]
        return f"the loss is finite, but not the gradient of {_join(names[:3])}, in the shard of rank {_join(bad_gradients)}"
    return f"loss and gradients are finite, but the gradient norm overflows to {norm}"


def _error(step: int, cause: str, valid: str = "earlier checkpoints") -> UserError:
    return UserError(
        f"step {step}: {cause}. The step was not saved; {valid} are valid. "
        "Lower optimizer.lr, increase schedule.warmup_steps, or inspect the data of that step"
    )


def _join(items: Sequence[object]) -> str:
    return ", ".join(map(str, items))
