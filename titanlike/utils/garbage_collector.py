"""Python garbage collection at the same steps on every rank."""

import gc

INTERVAL = 50  # steps


class GarbageCollector:
    """Replaces automatic garbage collection, which stops each rank at a different step and makes all others wait for it.

    with GarbageCollector() as garbage_collector:
        for step in ...:
            garbage_collector.step()
    """

    def __init__(self) -> None:
        self.steps = 0

    def __enter__(self) -> "GarbageCollector":
        gc.disable()
        return self

    def step(self) -> None:
        """Collects everything after the first step, which leaves the compiler's garbage, then young objects every `INTERVAL` steps.

        Later collections do not traverse the objects that are alive after the first step.
        """
        self.steps += 1
        if self.steps == 1:
            gc.collect()
            gc.freeze()
        elif self.steps % INTERVAL == 0:
            gc.collect(1)

    def __exit__(self, *error: object) -> None:
        gc.unfreeze()
        gc.enable()
