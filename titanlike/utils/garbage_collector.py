"""Python garbage collection at the same steps on every rank."""

import gc


class GarbageCollector:
    """Replaces automatic garbage collection, which stops each rank at a different step and makes all others wait for it."""

    def __init__(self, interval: int) -> None:
        """Disables automatic collection, unless `interval`, in steps, is 0."""
        self.interval = interval
        self.steps = 0
        if interval:
            gc.disable()

    def step(self) -> None:
        """Collects everything after the first step, which leaves the compiler's garbage, then young objects at the interval."""
        self.steps += 1
        if self.steps == 1:
            gc.collect()
        elif self.interval and self.steps % self.interval == 0:
            gc.collect(1)
