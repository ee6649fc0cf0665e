"""An optimizer of one's own, Lion, on sharded weights, compared with one process.

    torchrun --nproc-per-node=2 examples/own_optimizer.py

In a copy of recipes/pretrain.py, replace `build_optimizer(...)` by it. Checkpoints hold `optimizer.state`, and the
options of parameter groups that the optimizer changes (docs/optimizers.md).
"""

import copy
from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fsdp_tensor import Transformer, batch_of
from torch import Tensor, nn

from titanlike.distributed.process_group import session
from titanlike.optim.clipping import clip_gradients, gradient_norms
from titanlike.parallelisms.fsdp import apply_fsdp
from titanlike.parallelisms.mesh import build_mesh
from titanlike.utils.dtensor import local_tensor


class Lion(torch.optim.Optimizer):
    """Steps of equal size in the direction of the sign of the momentum. Elementwise, so each rank updates its shards alone."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, beta1: float = 0.9, beta2: float = 0.99) -> None:
        super().__init__(parameters, {"lr": lr, "beta1": beta1, "beta2": beta2})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates the weights."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(
                        parameter
                    )  # a DTensor, if the parameter is: a checkpoint reshards it
                weight, gradient, momentum = map(local_tensor, (parameter, parameter.grad, state["momentum"]))
                weight -= group["lr"] * momentum.lerp(gradient, 1 - group["beta1"]).sign()
                momentum.lerp_(gradient, 1 - group["beta2"])


def train(model: nn.Module, rank: int, num_ranks: int) -> Tensor:
    """Returns the local losses of ten steps."""
    optimizer, losses = Lion(model.parameters(), lr=1e-3), []
    for step in range(10):
        tokens = batch_of(step).chunk(num_ranks)[rank]
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        clip_gradients(model, gradient_norms(model).total, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def main() -> float:
    """Returns the largest difference of a step's loss from the loss of one process."""
    mesh = build_mesh("cpu", shard=dist.get_world_size())
    torch.manual_seed(0)
    model = Transformer()
    expected = train(copy.deepcopy(model), 0, 1)
    apply_fsdp(model, mesh.fsdp)
    losses = train(model, mesh.data_rank, mesh.num_data_ranks)
    dist.all_reduce(losses)
    assert expected[-1] < expected[0] - 0.5  # it learns
    return (losses / mesh.num_data_ranks - expected).abs().max().item()


if __name__ == "__main__":
    with session("cpu"):
        difference = main()
        print(f"largest difference of a loss from one process: {difference:.1e}")
        assert difference < 1e-4
