"""The largest absolute values of weights, from which their float8 scales follow: reduced together, once after each change."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from titanlike.utils.compat import foreach_norm
from titanlike.utils.dtensor import local_tensor, shard_groups


@cache
def optimizer_steps() -> Counter[str]:
    """Returns a counter of the optimizer steps in this process. A global hook counts the steps of every optimizer."""
    counter: Counter[str] = Counter()
    register_optimizer_step_post_hook(lambda *_: counter.update(["steps"]))
    return counter


class WeightChanges:
    """Whether weights have changed since the last call of `since_last`: by an optimizer step, or as marked."""

    def __init__(self) -> None:
        self.optimizer_steps = optimizer_steps()
        self.seen = -1  # number of optimizer steps at the last call

    def mark(self, *hook_args: object) -> None:
        """Marks a change other than an optimizer step."""
        self.seen = -1

    def since_last(self) -> bool:
        """Returns True at the first call, and after a change."""
        changed = self.seen != self.optimizer_steps["steps"]
        self.seen = self.optimizer_steps["steps"]
        return changed


@torch.no_grad()
def weight_maxima(weights: Sequence[DTensor]) -> Iterator[tuple[list[int], Tensor]]:
    """Yields indices of weights, and the largest absolute values of these weights in float32, with one all-reduce for each process
    group that shards them."""
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
    for index, weight in enumerate(weights):
        groups = tuple(group for group in shard_groups(weight) if group.size() > 1)
        by_groups.setdefault(groups, []).append(index)
    for groups, indices in by_groups.items():
        shards = [local_tensor(weights[index]) for index in indices]
        non_empty = [shard for shard in shards if shard.numel()]  # there may be more ranks than rows
        norms = iter(foreach_norm(non_empty, ord=torch.inf, dtype=torch.float32) if non_empty else [])
        zero = shards[0].new_zeros((), dtype=torch.float32)
        amax = torch.stack([next(norms) if shard.numel() else zero for shard in shards])
        for group in groups:
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
        yield indices, amax
