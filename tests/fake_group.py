"""A process group of one rank without the others, by private APIs of torch."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.tensor import debug


@contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """Initializes the process group of one rank without the others: collectives return at once and communicate with nobody."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # The results of DTensor's sharding rules refer to the process groups of the first mesh of each shape.
        debug._clear_sharding_prop_cache()
