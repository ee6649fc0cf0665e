"""Console output of a run: on a terminal a status that is updated in place below permanent lines, elsewhere plain lines."""

import math
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta

from titanlike.utils.live_line import LiveLine

Values = Mapping[str, float | None]

LEVELS = "▁▂▃▄▅▆▇█"
LOSSES = 30  # in the sparkline
PERMANENT_INTERVAL = 10  # records of training between permanent lines on a terminal
RECORDS = 10  # of which the remaining time is extrapolated


class Console(LiveLine):
    """Formats records for the console."""

    def __init__(self, num_steps: int, first_step: int) -> None:
        super().__init__(bar=True)
        self._draws_bars = "utf" in (sys.stdout.encoding or "").lower()
        self.num_steps = num_steps
        self._num_records = 0
        self._times: deque[tuple[int, float]] = deque(maxlen=RECORDS + 1)  # step and elapsed seconds, after the warm-up
        self._losses: deque[float] = deque(maxlen=LOSSES)
        self._best_validation = (math.inf, 0)  # loss and step
        self._step = first_step - 1
        self._training = f"step {first_step:>6}/{num_steps}  warming up"
        self._validation = self._checkpoint = ""
        self.refresh()

    def refresh(self, activity: str = "") -> None:
        """Shows the status on a terminal, with what the run does instead of training, such as "validating"."""
        if not self.is_terminal:
            return
        first, *others = self._training.format(validation=self._validation, checkpoint=self._checkpoint).split("\n")
        self.update("\n".join([f"{first}  {activity}".rstrip(), *others]), self._step, self.num_steps)

    def log(self, step: int, values: Values) -> None:
        """Shows a training step, a validation or a save. `sagemaker/request.py` of the tools has regular expressions for these."""
        if values.get("validation_loss") is not None:
            self._log_validation(step, values)
        elif values.get("save_seconds") is not None:
            self._log_save(step, values)
        else:
            self._log_training(step, values)
        self.refresh()

    def _log_validation(self, step: int, values: Values) -> None:
        loss = values["validation_loss"] or 0.0
        self._best_validation = min(self._best_validation, (loss, step))
        best, best_step = self._best_validation
        self._validation = f"  val {loss:.4f}" + (f" (best {best:.4f}, step {best_step})" if best < loss else "")
        if (accuracy := values.get("validation_accuracy")) is not None:
            self._validation += f"  accuracy {accuracy:.1%}"
        if (cross_entropy := values.get("validation_cross_entropy")) is not None:
            self._validation += f"  kl {values['validation_kl']:.4f}  cross-entropy {cross_entropy:.4f}"
        self.print(f"{self._prefix(step)}{self._validation}")

    def _log_save(self, step: int, values: Values) -> None:
        seconds, stall, size = (values[f"save_{name}"] or 0.0 for name in ("seconds", "stall_seconds", "bytes"))
        self._checkpoint = f"  saved step {step}"
        self.print(
            f"{self._prefix(step)}  saved  {size / 2**20:,.1f} MiB in {seconds:.2f} s; training paused for {stall:.2f} s"
        )

    def _log_training(self, step: int, values: Values) -> None:
        mfu, wait, self._step = values["mfu"], values["data_wait"] or 0.0, step
        loss, rate = f"loss {values['loss']:.4f}", f"{values['tokens_per_second']:.0f} tok/s"
        remaining = self._remaining(step, values["elapsed_seconds"] or 0.0)
        progress = f"  {remaining} left" if remaining else ""
        details = f"  grad {values['grad_norm']:.2f}  lr {values['learning_rate']:.1e}"
        if (accuracy := values.get("rewards/accuracies")) is not None:
            details += f"  accuracy {accuracy:.1%}  margin {values['rewards/margins']:.3g}"
        if (cross_entropy := values.get("cross_entropy")) is not None:
            details += f"  kl {values['kl']:.4f}  cross-entropy {cross_entropy:.4f}"
        speed = f"  {values['tflops_per_device']:.3g} TFLOP/s{'' if mfu is None else f'  MFU {mfu:.1%}'}"
        memory = f"  {values['memory_gib']:.2f} GiB"
        self._num_records += 1
        if not self.is_terminal or step == self.num_steps or self._num_records % PERMANENT_INTERVAL == 1:
            in_status = self.is_terminal  # and outdated in the history
            self.print(f"{self._prefix(step)}  {loss}  {rate}{'' if in_status else progress}{details}{speed}{memory}")
        self._losses.append(values["loss"] if values["loss"] is not None else math.nan)
        self._training = "\n".join(
            (
                f"{self._prefix(step)}{progress}",
                f"{loss}{sparkline(self._losses) if self._draws_bars else ''}{{validation}}{details}",
                f"{rate}{speed}{memory}  data wait {wait:.1%}{{checkpoint}}",
            )
        )

    def _prefix(self, step: int) -> str:
        return f"step {step:>6}/{self.num_steps}"

    def _remaining(self, step: int, elapsed: float) -> str:
        """Returns the remaining time, with validation and saves as in the last records. Empty before the second one: the first
        includes the warm-up."""
        self._times.append((step, elapsed))
        (first, start), (last, now) = self._times[0], self._times[-1]
        if first == last or step == self.num_steps:
            return ""
        return str(timedelta(seconds=round((now - start) / (last - first) * (self.num_steps - step))))


def sparkline(values: Sequence[float]) -> str:
    """Returns values as a line of bars between their minimum and maximum. `x` stands for a value that is not finite."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(LEVELS) - 1) / (high - low) if high > low else 0.0
    return "  " + "".join(LEVELS[round((v - low) * scale)] if math.isfinite(v) else "x" for v in values)
