"""Learning rates of Megatron-LM, as the schedule of a recipe. `megatron.py` calls it."""

import math
from dataclasses import dataclass

from titanlike.config.optimizer import Schedule
from titanlike.tools.migration.conversion import Conversion


@dataclass(frozen=True)
class MegatronSchedule:
    """Megatron-LM's learning rate with a constant batch. Lengths are in steps, rates are fractions of the peak."""

    warmup: float
    decay_steps: float
    style: str
    minimum: float
    initial: float = 0.0
    wsd: float = 0.0
    wsd_style: str = "exponential"
    batch: int = 1

    def rate(self, step: int) -> float:
        """Returns the learning rate of a step, counted from 1."""
        done = step - 1
        if self.warmup > 0 and done <= self.warmup:
            return self.initial + (1.0 - self.initial) * done / self.warmup
        if self.style == "constant":
            return 1.0
        if done > self.decay_steps:
            return self.minimum
        if self.style == "inverse-square-root":  # of samples
            return max(self.minimum, math.sqrt(max(self.warmup * self.batch, 1) / max(done * self.batch, 1)))
        progress, shape = (done - self.warmup) / max(self.decay_steps - self.warmup, 1e-9), self.style
        if self.style == "WSD":
            progress, shape = max(0.0, done - (self.decay_steps - self.wsd)) / max(self.wsd, 1e-9), self.wsd_style
        remaining = {
            "linear": 1.0 - progress,
            "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
            "exponential": 2.0 * 0.5**progress - 1.0,
            "minus_sqrt": 1.0 - math.sqrt(max(0.0, progress)),
        }.get(shape, 1.0)
        return self.minimum + (1.0 - self.minimum) * remaining


def set_schedule(job: Conversion, steps: int) -> None:
    """Sets the schedule of a run with this number of steps."""
    total = job.tables["training"]["global_batch_size"]
    decay_keys, warmup_keys = ("--lr-decay-iters", "--lr-decay-samples"), ("--lr-warmup-iters", "--lr-warmup-samples")
    decay_steps = job[decay_keys[0]] or (job[decay_keys[1]] or 0) / total or steps
    fraction = job["--lr-warmup-fraction"]
    warmup = fraction * decay_steps if fraction is not None else job[warmup_keys[0]] or job[warmup_keys[1]] / total
    style, minimum, peak = job["--lr-decay-style"], job["--min-lr"], job["--lr"]
    style = "WSD" if style.upper() == "WSD" else style
    wsd = job["--lr-wsd-decay-iters"] or (job["--lr-wsd-decay-samples"] or 0) / total
    wsd_style = job["--lr-wsd-decay-style"]
    shape = {"constant": "none", "linear": "linear", "cosine": "cosine"}.get(style, "")
    if style == "WSD":
        shape = {"linear": "linear", "cosine": "cosine", "minus_sqrt": "sqrt"}.get(wsd_style, "")
        if not shape:
            job.lack("--lr-wsd-decay-style", "no such shape here; 'sqrt' is nearest, which falls fast at first too")
            shape = "sqrt"
    if not shape:
        job.leave("--lr-decay-style", "no such schedule here; the learning rate is constant after the warmup")
        shape = "none"
    ratio = min(1.0, wsd / steps) if style == "WSD" else 0.0
    rounded = min(steps, round(warmup))
    comment = f"{warmup:.2f} steps there" if rounded != warmup else ""
    job.set("schedule.warmup_steps", rounded, *warmup_keys, "--lr-warmup-fraction", comment=comment)
    job.set("schedule.decay", shape, "--lr-decay-style", "--lr-wsd-decay-style")
    job.set("schedule.decay_ratio", ratio, "--lr-wsd-decay-iters", "--lr-wsd-decay-samples")
    job.set("schedule.min_ratio", min(1.0, minimum / peak), "--min-lr", "--lr")
    section = job.checked(Schedule, job.tables["schedule"])
    minimum, initial = minimum / peak, job["--lr-warmup-init"] / peak
    theirs = MegatronSchedule(warmup, decay_steps, style, minimum, initial, wsd, wsd_style, total)
    why = "it counts from 0 there, so that the first step of a warmup has a learning rate of 0"
    if theirs.decay_steps != steps:
        why += f"; the decay ends at step {theirs.decay_steps:,.0f} of {steps:,} there, and at the last here"
    if "batch_ramp" in job.tables["training"]:
        why += "; it counts samples there, so that it is slower during the ramp of the batch size"
    job.compare_schedule(section, steps, theirs.rate, why)
