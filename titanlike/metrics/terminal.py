"""A run on the screen: one live line on a terminal, plain lines elsewhere."""

import errno
import sys

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn


class Screen:
    """Shows records as they come."""

    def __init__(self, num_steps: int, first_step: int) -> None:
        self.num_steps = num_steps
        self.validation = ""
        console = Console(file=sys.stdout, highlight=False, markup=False)
        self.progress: Progress | None = None
        if console.is_terminal:
            columns = (BarColumn(bar_width=16), TextColumn("{task.description}", markup=False))
            self.progress = Progress(*columns, console=console, auto_refresh=False)
            self.task = self.progress.add_task("starting", total=num_steps, completed=first_step - 1)
            self.progress.start()

    def show(self, step: int, values: dict[str, float | None]) -> None:
        """Show the numbers of a step."""
        if values.get("validation_loss") is not None:
            self.validation = f"  val {values['validation_loss']:.4f}"
            if self.progress is None:
                _say(f"step {step:>6}/{self.num_steps}{self.validation}")
            return
        if values.get("save_seconds") is not None:
            if self.progress is None:
                seconds, stall, size = (values[f"save_{name}"] or 0.0 for name in ("seconds", "stall_seconds", "bytes"))
                _say(
                    f"step {step:>6}/{self.num_steps}  saved  {size / 2**20:,.1f} MiB in {seconds:.2f} s; training stood "
                    f"still for {stall:.2f} s"
                )
            return
        mfu = values["mfu"]
        left = (values["step_seconds"] or 0) * (self.num_steps - step)
        tokens = values["tokens_per_second"] or 0.0
        speed = _short(tokens) if self.progress else f"{tokens:.0f}"  # for whoever reads numbers off a log's lines
        # What matters most comes first: a narrow terminal cuts off the rest.
        text = (
            f"step {step:>6}/{self.num_steps}  loss {values['loss']:.4f}{self.validation if self.progress else ''}"
            f"  {speed} tok/s  {_time(left)} left"
            f"  grad {values['grad_norm']:.2f}  lr {values['learning_rate']:.1e}"
            f"  {values['tflops_per_device']:.3g} TFLOP/s  MFU {'unknown' if mfu is None else f'{mfu:.1%}'}"
            f"  {values['memory_gib']:.2f} GiB"
        )
        if self.progress is None:
            _say(text)
        else:
            self.progress.update(self.task, completed=step, description=text)
            self.progress.refresh()

    def note(self, text: str) -> None:
        """Show a line of text, above the live line if there is one."""
        if self.progress is None:
            _say(text)
        else:
            self.progress.console.print(text)

    def close(self) -> None:
        """Leave the live line as it stands; what is noted after it stands below."""
        if self.progress is not None:
            self.progress.stop()
            self.progress = None


def _say(text: str) -> None:
    """Print. Where that goes to a file on a full disk, a line may be lost, but not the run."""
    try:
        print(text, flush=True)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise


def _time(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _short(value: float) -> str:
    for size, unit in ((1e6, "M"), (1e3, "K")):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"
