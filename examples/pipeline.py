"""Pipeline parallelism x FSDP on a module of one's own, compared with one process.

torchrun --nproc-per-node=4 examples/pipeline.py
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fsdp_tensor import DIM, VOCAB, Block, batch_of
from torch import Tensor, nn

from titanlike.distributed.process_group import session
from titanlike.parallelisms.fsdp import apply_fsdp
from titanlike.parallelisms.mesh import build_mesh
from titanlike.parallelisms.pipeline import Pipeline

STEPS, NUM_MICROBATCHES = 3, 4


class Decoder(nn.Module):
    """A model that can be split: `Pipeline` documents the names. Stages set the modules of others to None."""

    first_stage_modules = ("tok_embeddings",)
    last_stage_modules = ("output",)

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings: nn.Module | None = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleDict({str(index): Block() for index in range(4)})
        self.output: nn.Module | None = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """Returns the activations of this stage or, of the last stage with labels, their summed loss."""
        h = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h)
        if self.output is None or labels is None:
            return h if self.output is None else self.output(h)
        return F.cross_entropy(self.output(h).flatten(0, 1), labels.flatten(), reduction="sum")


class MicroBatch:
    """What `Pipeline.forward_backward` takes."""

    def __init__(self, tokens: Tensor) -> None:
        self.inputs, self.labels = {"tokens": tokens[:, :-1]}, tokens[:, 1:].contiguous()


def main(schedule: str = "1f1b") -> float:
    """Returns the largest difference of a step's loss from the loss of one process."""
    mesh = build_mesh("cpu", pipeline=2, shard=dist.get_world_size() // 2)
    torch.manual_seed(0)
    reference: Any = Decoder()
    split = [2, 2] if schedule == "1f1b" else [1, 1, 1, 1]
    model = Pipeline(reference, mesh.pipeline, schedule=schedule, split=split, dtype=torch.float32)
    for stage in model.parts.values():
        apply_fsdp(stage, mesh.fsdp, reshard_after_forward="never")
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, foreach=False) for one in (model, reference)]
    # The loss of a micro-batch is a sum over its tokens: divided by the tokens of this rank, it is a mean.
    num_tokens, worst = batch_of(0)[:, 1:].numel() // mesh.num_data_ranks, 0.0
    for step in range(STEPS):
        tokens = batch_of(step)
        labels = tokens[:, 1:]
        expected = reference(tokens[:, :-1], labels) / labels.numel()
        expected.backward()
        local = tokens.chunk(mesh.num_data_ranks)[mesh.data_rank]
        microbatches = [MicroBatch(part) for part in local.chunk(NUM_MICROBATCHES)]
        loss = model.forward_backward(microbatches, lambda loss: loss / num_tokens)
        dist.all_reduce(loss)  # 0 on the ranks without the last stage
        worst = max(worst, (loss / mesh.num_data_ranks - expected.detach()).abs().item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return worst


if __name__ == "__main__":
    with session("cpu"):
        difference = main()
        print(f"largest difference of a loss from one process: {difference:.1e}")
        assert difference < 1e-5
