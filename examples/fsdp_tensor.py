"""FSDP x tensor parallelism on a module of one's own, in an ordinary loop, compared with one process.

torchrun --nproc-per-node=4 examples/fsdp_tensor.py
"""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.distributed.process_group import session
from titanlike.parallelisms.fsdp import apply_fsdp
from titanlike.parallelisms.mesh import build_mesh
from titanlike.parallelisms.tensor import apply_tensor

VOCAB, DIM, HEAD_DIM, STEPS = 64, 64, 16, 5


class Block(nn.Module):
    """A transformer block. Its code takes the number of heads from the projections, whose outputs may be sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM) for _ in range(4))
        self.up, self.down = nn.Linear(DIM, 128), nn.Linear(128, DIM)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (linear(h).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A decoder without anything parallel in it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


PLAN = {
    "embed": "vocab_parallel",
    "blocks.*.norm*": "sequence_parallel",
    **dict.fromkeys(("blocks.*.q", "blocks.*.k", "blocks.*.v", "blocks.*.up"), "colwise"),
    **dict.fromkeys(("blocks.*.out", "blocks.*.down"), "rowwise"),
    "head": "colwise_gather_output",
}


def batch_of(step: int) -> Tensor:
    """Returns the global batch of a step: sequences that count upward."""
    starts = torch.randint(0, VOCAB, (8, 1), generator=torch.Generator().manual_seed(step))
    return (starts + torch.arange(17)) % VOCAB


def train(model: nn.Module, rank: int, num_ranks: int, steps: int = STEPS) -> list[float]:
    """Trains on this rank's part of each batch with a mean loss. Returns the local losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5, foreach=False)
    losses = []
    for step in range(steps):
        tokens = batch_of(step).chunk(num_ranks)[rank]
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> float:
    """Returns the largest difference of a step's loss from the loss of one process."""
    tensor = 2 if dist.get_world_size() % 2 == 0 else 1
    mesh = build_mesh("cpu", shard=dist.get_world_size() // tensor, tensor=tensor)
    torch.manual_seed(0)  # all ranks build the same model
    model = Transformer()
    expected = train(copy.deepcopy(model), 0, 1)
    apply_tensor(model, PLAN, mesh.tensor)
    apply_fsdp(model, mesh.fsdp)
    losses = torch.tensor(train(model, mesh.data_rank, mesh.num_data_ranks))
    dist.all_reduce(losses, group=mesh.fsdp.get_group())
    return (losses / mesh.num_data_ranks - torch.tensor(expected)).abs().max().item()


if __name__ == "__main__":
    with session("cpu"):
        difference = main()
        print(f"largest difference of a loss from one process: {difference:.1e}")
        assert difference < 1e-5
