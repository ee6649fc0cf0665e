"""A data source of one's own with validation, compared with one process. docs/data.md describes the interface.

    torchrun --nproc-per-node=2 examples/own_data.py

In a copy of recipes/pretrain.py, pass `open_sources=open_sources` to `build_dataloaders`.
"""

import copy

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fsdp_tensor import VOCAB, Transformer
from torch import Tensor, nn

from titanlike.config.sections import Data, Training
from titanlike.config.sections import Tokenizer as TokenizerSection
from titanlike.data.batches.dataloaders import DataLoaders, build_dataloaders
from titanlike.data.batches.loader import Batch
from titanlike.data.batches.packed_dataset import SequenceBatch
from titanlike.data.batches.sources import Sources
from titanlike.data.tokens.tokenizer import Tokenizer, build_tokenizer
from titanlike.distributed.process_group import session
from titanlike.parallelisms.fsdp import apply_fsdp
from titanlike.parallelisms.mesh import build_mesh


class CountingSource:
    """Sequences that count upward in steps of 1 to 3: a function of the step and the row, so it has no position to save."""

    def __init__(self, seq_len: int, seed: int) -> None:
        self.seq_len, self.seed = seq_len, seed
        self.fingerprint = f"counting, version 1, seed {seed}"  # a resume with another one is refused

    def read(self, step: int, rows: range) -> SequenceBatch:
        """Returns these rows of the global batch of a step."""
        draws = np.array([np.random.default_rng((self.seed, step, row)).integers((VOCAB, 3)) for row in rows])
        tokens = (draws[:, :1] + (draws[:, 1:] + 1) * np.arange(self.seq_len + 1)) % VOCAB
        return SequenceBatch(np.array(rows) + step * 1_000_000, tokens)

    def position(self) -> None:
        """The step is the only state."""

    def load_position(self, position: object) -> None:
        """There is none."""

    def describe(self, steps: int) -> str:
        """Summarizes the data."""
        return f"{steps} steps of counting"


def open_sources(
    section: Data, tokenizer: Tokenizer, *, seq_len: int, global_batch_size: int, seed: int, validate: bool
) -> Sources:
    """Opens the training data, and other sequences to validate on."""
    return Sources(CountingSource(seq_len, seed), CountingSource(seq_len, seed + 1) if validate else None)


def open_data(data_rank: int, num_data_ranks: int) -> DataLoaders:
    """Returns the loaders of a data-parallel rank."""
    return build_dataloaders(
        Data(), Training(seq_len=16, global_batch_size=8, local_batch_size=8), build_tokenizer(TokenizerSection()), seed=0,
        validate=True, dropout=False, data_rank=data_rank, num_data_ranks=num_data_ranks, position_ids=torch.arange(16),
        device=torch.device("cpu"), open_sources=open_sources,
    )  # fmt: skip


def train(model: nn.Module, data: DataLoaders) -> Tensor:
    """Returns this rank's training losses of ten steps, and the validation loss before and after."""

    def loss_of(batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch.inputs["tokens"]).flatten(0, 1), batch.labels.flatten())

    def validate() -> Tensor:
        assert data.validation is not None
        batches = [data.validation.microbatches(index)[0] for index in (1, 2)]
        with torch.no_grad():
            return torch.stack([loss_of(batch) for batch in batches]).mean()

    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5), [validate()]
    for step in range(1, 11):
        (batch,) = data.training.microbatches(step)
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack([*losses, validate()])


def main() -> float:
    """Returns the largest difference of a loss from one process."""
    mesh = build_mesh("cpu", shard=dist.get_world_size())
    torch.manual_seed(0)
    model = Transformer()
    expected = train(copy.deepcopy(model), open_data(0, 1))
    apply_fsdp(model, mesh.fsdp)
    losses = train(model, open_data(mesh.data_rank, mesh.num_data_ranks))
    dist.all_reduce(losses)
    assert expected[-1] < expected[0] - 1.0  # the validation loss falls
    return (losses / mesh.num_data_ranks - expected).abs().max().item()


if __name__ == "__main__":
    with session("cpu"):
        difference = main()
        print(f"largest difference of a loss from one process: {difference:.1e}")
        assert difference < 1e-4
