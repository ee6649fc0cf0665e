"""A process group of one rank without the others, and tensors without data, by private APIs of torch."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
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


def fake_tensors() -> AbstractContextManager[Any]:
    """Returns a context in which tensors have no data. Operators also take tensors from outside, as of the meta device."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def efficient_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns attention with biases of the scores, or causal attention for values of another size than queries and keys. Otherwise
    fake tensors would get operators that keep all scores, which GPUs do not use."""
    if bias is not None:
        bias = bias.expand(*q.shape[:3], k.shape[2])
    out: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, is_causal=bias is None)[0]
    return out
