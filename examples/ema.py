"""An exponential moving average (EMA) of sharded weights: evaluated, saved, resumed, and compared with torch's in one process.

    torchrun --nproc-per-node=2 examples/ema.py

`torch.optim.swa_utils.AveragedModel` copies the model, which FSDP does not support. In a copy of recipes/pretrain.py, build `EMA`
after `initialize`, pass `average=ema` to `run.restore` and `run.save`, call `ema.reset()` after `run.restore` if `run.step` is 0,
and `ema.update()` after `run.update`. Give `run.on_validation` a function that validates inside of `with ema.applied():`.
"""

import copy
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fsdp_tensor import PLAN, Transformer, batch_of
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from titanlike.checkpoint import CheckpointManager, CheckpointMetadata
from titanlike.config.sections import Checkpoint
from titanlike.distributed.process_group import broadcast_object, session
from titanlike.parallelisms.fsdp import apply_fsdp
from titanlike.parallelisms.mesh import Mesh, build_mesh
from titanlike.parallelisms.tensor import apply_tensor
from titanlike.utils.dtensor import local_tensor

DECAY = 0.8


class EMA(nn.Module):
    """The average of a model's parameters, in float32. Each rank averages its own shards, without communication."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__()
        self.model = (model,)  # in a tuple, so that it is not a child
        self.decay = decay
        self.weights = list(model.parameters())
        for name, parameter in model.named_parameters():
            # A DTensor, if the parameter is: a checkpoint reshards it. Names of buffers do not contain dots.
            self.register_buffer(name.replace(".", "/"), parameter.detach().to(torch.float32, copy=True))

    @torch.no_grad()
    def reset(self) -> None:
        """Starts from the present weights, such as the initial weights of a run, once they are loaded."""
        torch._foreach_copy_(
            [local_tensor(average) for average in self.buffers()], list(map(local_tensor, self.weights))
        )

    @torch.no_grad()
    def update(self) -> None:
        """Moves the average towards the weights."""
        local_averages = [local_tensor(average) for average in self.buffers()]
        torch._foreach_lerp_(local_averages, [local_tensor(weight).float() for weight in self.weights], 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Gives the model the averaged weights in this context."""
        weights = [local_tensor(weight).detach().clone() for weight in self.weights]
        self._set_weights([local_tensor(average) for average in self.buffers()])
        try:
            yield
        finally:
            self._set_weights(weights)

    @torch.no_grad()
    def _set_weights(self, values: Sequence[Tensor]) -> None:
        torch._foreach_copy_([local_tensor(weight) for weight in self.weights], list(values))
        # After a forward pass without a backward pass, FSDP would compute with the weights that it has gathered before. Loading a
        # state frees them, and makes float8 compute the scales of the weights again.
        self.model[0].load_state_dict({}, strict=False)


def loss_of(model: nn.Module, step: int, rank: int, num_ranks: int) -> Tensor:
    """Returns the mean loss of this rank's part of a batch."""
    tokens = batch_of(step).chunk(num_ranks)[rank]
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Returns the optimizer."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    rank: int,
    num_ranks: int,
    update: Callable[[], None],
) -> None:
    """Trains, and calls `update` after each step."""
    for step in steps:
        loss_of(model, step, rank, num_ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
        update()


def build(mesh: Mesh) -> tuple[nn.Module, torch.optim.Optimizer, EMA]:
    """Returns a sharded model, its optimizer and its average."""
    torch.manual_seed(0)
    model = Transformer()
    apply_tensor(model, PLAN, mesh.tensor)
    apply_fsdp(model, mesh.fsdp)
    return model, adamw(model), EMA(model, DECAY)


def main() -> float:
    """Returns the largest difference of an average, a weight or the loss of the average from one process."""
    torch.manual_seed(0)
    expected_model = Transformer()
    expected = AveragedModel(copy.deepcopy(expected_model), multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    expected.update_parameters(expected_model)  # the first call copies
    train(expected_model, adamw(expected_model), range(10), 0, 1, lambda: expected.update_parameters(expected_model))

    tensor = 2 if dist.get_world_size() % 4 == 0 else 1
    mesh = build_mesh("cpu", shard=dist.get_world_size() // tensor, tensor=tensor)
    rank = mesh.data_rank, mesh.num_data_ranks

    @torch.no_grad()
    def evaluate() -> Tensor:
        with ema.applied():
            loss = loss_of(model, 99, *rank)
        dist.all_reduce(loss, group=mesh.fsdp.get_group())
        return loss / mesh.num_data_ranks

    with tempfile.TemporaryDirectory() as own_folder:
        checkpoints = CheckpointManager(broadcast_object(own_folder), Checkpoint())
        model, optimizer, ema = build(mesh)
        train(model, optimizer, range(5), *rank, ema.update)
        checkpoints.save(model, optimizer, CheckpointMetadata(5), wait=True, average=ema)
        # Resumes, as another process does, and evaluates the average at each step.
        model, optimizer, ema = build(mesh)
        saved = checkpoints.find()
        assert saved is not None
        checkpoints.load(model, optimizer, saved, average=ema)
        for step in range(5, 10):
            loss = evaluate()
            train(model, optimizer, range(step, step + 1), *rank, ema.update)
        loss = evaluate()
        checkpoints.close()
        dist.barrier()

    def worst(found: Sequence[Tensor], others: Sequence[Tensor]) -> float:
        whole = [getattr(tensor, "full_tensor", lambda tensor=tensor: tensor)() for tensor in found]
        return max((a - b).abs().max().item() for a, b in zip(whole, others, strict=True))

    with torch.no_grad():
        return max(
            worst(list(ema.buffers()), list(expected.module.parameters())),
            worst(list(model.parameters()), list(expected_model.parameters())),
            abs((loss - loss_of(expected.module, 99, 0, 1)).item()),
        )


if __name__ == "__main__":
    with session("cpu"):
        difference = main()
        print(f"largest difference from one process: {difference:.1e}")
        assert difference < 1e-5
