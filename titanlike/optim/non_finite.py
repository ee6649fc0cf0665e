"""Detection of steps with a non-finite loss or gradient norm: stops the run, or skips the update."""

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from titanlike.config import UserError
from titanlike.config.sections import Training
from titanlike.distributed import collectives, process_group
from titanlike.losses.cross_entropy import NO_LABEL
from titanlike.optim.clipping import Norms
from titanlike.utils.async_d2h import AsyncD2H


class LossScale:
    """The factor of the loss in float16, in which the gradients of a mean over many tokens would be zero. In other dtypes it is 1.

    A step whose gradients overflow is not applied and halves the factor; `GROWTH_INTERVAL` steps without one double it.
    """

    INITIAL = 2.0**16
    LARGEST = 2.0**24
    GROWTH_INTERVAL = 2000

    def __init__(self, dtype: str = "float32", state: Sequence[float] = ()) -> None:
        """`dtype` is of the backward pass; `state` comes from a checkpoint."""
        self.adapts = dtype == "float16"
        self.value, self.num_steps = (1.0, 0)
        if self.adapts:
            self.value, num_steps = state or (self.INITIAL, 0)
            self.num_steps = int(num_steps)  # since it changed

    @property
    def state(self) -> list[float]:
        """What a checkpoint contains."""
        return [self.value, self.num_steps] if self.adapts else []

    def update(self, *, overflow: bool) -> None:
        """Adapts the factor after a step."""
        self.num_steps += 1
        if overflow:
            self.value, self.num_steps = self.value / 2, 0
        elif self.num_steps == self.GROWTH_INTERVAL:
            self.value, self.num_steps = min(self.value * 2, self.LARGEST), 0


class NonFiniteGuard:
    """Detects non-finite steps and reports the rank and the parameters at fault.

    `stop` raises an error. On a GPU it applies the update and checks the step while the next one runs, so that host and device do
    not wait for each other; call `flush` before a checkpoint. `skip` checks a step before the optimizer update, and skips the
    update unless that happens too often. With a loss scale that adapts, a step with a finite loss is skipped if its gradients
    overflow, however often.
    """

    def __init__(
        self,
        training: Training,
        skipped: Sequence[int] = (),
        loss_scale: Sequence[float] = (),
        *,
        window: int = 100,
        on_skip: Callable[[int, str], None] = lambda step, cause: None,
    ) -> None:
        """Skips at most `training.skip_limit` of any `window` consecutive steps. `skipped` lists the steps skipped before a resume,
        `loss_scale` is the state of `LossScale` then. Each skip calls `on_skip(step, cause)`."""
        self.non_finite = training.non_finite
        self.limit = training.skip_limit
        self.window = window
        # Checkpointed: otherwise a run that is killed and resumed could skip without limit.
        self.skipped = list(skipped)
        self.scaling = LossScale(training.compute_dtype, loss_scale)
        self.on_skip = on_skip
        self.pending: list[tuple[int, AsyncD2H, list[str]]] = []

    @property
    def loss_scale(self) -> float:
        """The factor of the loss in the next backward pass."""
        return self.scaling.value

    @property
    def state(self) -> tuple[list[int], list[float]]:
        """What a checkpoint contains: the skipped steps, and the state of the loss scale."""
        return self.skipped, self.scaling.state

    @property
    def metrics(self) -> dict[str, Tensor]:
        """What to record of each step: the loss scale of the next one, if it adapts."""
        return {"loss_scale": torch.tensor(self.scaling.value)} if self.scaling.adapts else {}

    def should_step(self, step: int, loss: Tensor, local_loss: Tensor, norms: Norms, count: Tensor) -> bool:
        """Whether to apply the optimizer update. The result, or the error, is the same on all ranks.

        Args:
            count: number of labels, or pairs, that the loss is a mean over.
        """
        if self.non_finite == "skip" or self.scaling.adapts:
            return self._check_before_update(step, loss, local_loss, norms, count)
        # `loss`, `norms.total` and `count` are the same on all ranks.
        values = AsyncD2H(loss, local_loss, norms.total, count, norms.parts)
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

    def _check_before_update(self, step: int, loss: Tensor, local_loss: Tensor, norms: Norms, count: Tensor) -> bool:
        # A fault of a single rank must not make its decision differ from its replicas': all ranks check the same sum.
        assert dist.group.WORLD is not None
        totals = torch.stack((loss, loss + norms.total.to(loss.device)))
        collectives.all_reduce_sum(totals, [dist.group.WORLD])
        total_loss, *values = AsyncD2H(totals, local_loss, norms.total, count, norms.parts).read()
        cause = _cause(*values, names=norms.names)
        overflow = bool(cause) and math.isfinite(total_loss)
        if self.scaling.adapts and (overflow or not cause):
            self.scaling.update(overflow=overflow)
            if self.scaling.value < 1.0:
                raise UserError(
                    f"step {step}: {cause}, in float16 without a loss scale; set training.compute_dtype = 'bfloat16' or "
                    "'float32', or lower optimizer.lr"
                )
            if overflow:
                self.on_skip(step, f"{cause}; the loss scale is now {self.scaling.value:g}")
            return not overflow
        if not cause:
            return True
        if self.non_finite == "stop":
            raise _error(step, cause)
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


def _cause(loss: float, local_loss: float, norm: float, count: float, *parts: float, names: Sequence[str]) -> str:
    """Returns the origin of non-finite values, "" if all are finite. Collective: `loss + norm` is the same on all ranks."""
    if math.isfinite(loss + norm):
        return ""
    if not count:
        return f"the global batch has {NO_LABEL}"
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
    remedy = "Lower optimizer.lr, increase schedule.warmup_steps, or inspect the data of that step"
    if NO_LABEL in cause:
        remedy = "Increase training.global_batch_size, or set training.non_finite = 'skip'"
    return UserError(f"step {step}: {cause}. The step was not saved; {valid} are valid. {remedy}")


def _join(items: Sequence[object]) -> str:
    return ", ".join(map(str, items))
