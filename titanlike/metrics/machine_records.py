"""What a run records of its machines."""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from titanlike.distributed import process_group
from titanlike.metrics.machine import Sampler, ThrottleWarnings, open_gpu, open_sources, place_of, summarize


class MachineRecords:
    """Samples this rank's machine. All ranks create it together, and pass the values of all of them to `summarize`.

    Args:
        folder: is on the disk whose free space is measured; None: it is not.
        interval: seconds between samples.
    """

    def __init__(self, device: torch.device, folder: Path | None, interval: float) -> None:
        gpu = open_gpu(device)
        own = place_of(device, gpu)
        self.places = process_group.all_gather_object(own) if dist.is_initialized() else [own]
        self._sampler = Sampler(open_sources(gpu, folder), interval)
        self._warnings = ThrottleWarnings()

    @property
    def rank_names(self) -> list[str]:
        """The names of the ranks in messages."""
        return [place.of(rank) for rank, place in enumerate(self.places)]

    def take(self) -> list[float]:
        """Returns what this rank has sampled since the last call."""
        return self._sampler.take()

    def summarize(self, rows: Sequence[Sequence[float]]) -> tuple[dict[str, float], list[str]]:
        """Returns what to record of the values of all ranks, and warnings."""
        problem = self._sampler.take_problem()
        return summarize(rows), [*([problem] if problem else []), *self._warnings.update(rows, self.places)]

    def close(self) -> None:
        """Ends the sampling."""
        self._sampler.close()
