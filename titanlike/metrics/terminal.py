"""Console output of a run: a status line on a terminal, plain log lines elsewhere."""

from collections.abc import Mapping
from datetime import timedelta

from titanlike.utils.live_line import LiveLine


class Console(LiveLine):
    """Formats records for the console."""

    def __init__(self, num_steps: int, first_step: int) -> None:
        super().__init__(bar=True)
        self.num_steps = num_steps
        self._validation = ""
        if self.is_terminal:
            self.update("starting", first_step - 1, num_steps)

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        """Shows a training step, a validation or a save. `sagemaker/request.py` has regular expressions for these lines."""
        terminal, prefix = self.is_terminal, f"step {step:>6}/{self.num_steps}"
        if values.get("validation_loss") is not None:
            self._validation = f"  val {values['validation_loss']:.4f}"
            if not terminal:
                self.print(f"{prefix}{self._validation}")
        elif values.get("save_seconds") is not None:
            if not terminal:
                seconds, stall, size = (values[f"save_{name}"] or 0.0 for name in ("seconds", "stall_seconds", "bytes"))
                self.print(
                    f"{prefix}  saved  {size / 2**20:,.1f} MiB in {seconds:.2f} s; training paused for {stall:.2f} s"
                )
        else:
            mfu = values["mfu"]
            remaining = (values["step_seconds"] or 0) * (self.num_steps - step)
            # A narrow terminal truncates the line: the most important values come first.
            text = (
                f"{prefix}  loss {values['loss']:.4f}{self._validation if terminal else ''}"
                f"  {values['tokens_per_second']:.0f} tok/s  {timedelta(seconds=round(remaining))} left"
                f"  grad {values['grad_norm']:.2f}  lr {values['learning_rate']:.1e}"
                f"  {values['tflops_per_device']:.3g} TFLOP/s  MFU {'unknown' if mfu is None else f'{mfu:.1%}'}"
                f"  {values['memory_gib']:.2f} GiB"
            )
            self.update(text, step, self.num_steps)
