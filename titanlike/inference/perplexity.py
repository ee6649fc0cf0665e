"""Loss, perplexity and bits per byte of text or token shards, under any layout.

The documents are read in their order as one stream of tokens, and cut into sequences. Each token but the first is predicted once.
"""

import math
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from titanlike.data.batches.loader import Batch
from titanlike.data.batches.packed_dataset import positions_in_documents, separate_documents
from titanlike.data.tokens.shards import Shards
from titanlike.data.tokens.tokenizer import Separator, Tokenizer
from titanlike.distributed import collectives
from titanlike.inference.logits import check_finite, round_up, sequence_multiple
from titanlike.losses import IGNORE
from titanlike.losses.cross_entropy import means_of, num_valid
from titanlike.parallelisms.context import context_position_ids
from titanlike.parallelisms.mesh import Mesh
from titanlike.parallelisms.pipeline import Pipeline

DECODED_TOKENS = 2**20  # that are decoded at once, to count their bytes


@torch.no_grad()
def perplexity(
    model: nn.Module,
    mesh: Mesh,
    tokens: Shards,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    batch_size: int,
    device: torch.device,
    document_masks: bool = False,
    limit: int = 0,
    name: str = "the text",
    on_batch: Callable[[int, int], object] = lambda *_: None,
) -> dict[str, float]:
    """Returns the loss per token in nats, the perplexity and the bits per byte of text. All ranks get the same values.

    Args:
        batch_size: number of sequences in a forward pass of a rank.
        document_masks: masks attention between documents; the first token of a document is then not predicted.
        limit: number of sequences to read. 0: all.
        name: of the text, for errors.
        on_batch: called with the number of batches that this rank has read, and the number of all its batches.
    """
    total, count = torch.zeros(2, device=device, dtype=collectives.sum_dtype(device))
    batches = _TextBatches(tokens, mesh, seq_len, batch_size, tokenizer.separator if document_masks else None, limit)
    for number, batch in enumerate(batches, 1):
        inputs = {name: values.to(device) for name, values in batch.inputs.items()}
        labels = batch.labels.to(device)
        if isinstance(model, Pipeline):
            total += model.evaluate([Batch(inputs, labels)])
        else:
            total += model(**inputs, labels=labels).sum()  # a model may return the loss of each token
        count += num_valid(labels)
        on_batch(number, batches.num_batches)
    collectives.all_reduce_sum(total, [*mesh.loss_groups, mesh.pipeline.get_group()])
    collectives.all_reduce_sum(count, mesh.loss_groups)
    size = torch.tensor(
        float(_num_bytes(tokens, tokenizer, mesh, batches.num_tokens)), dtype=total.dtype, device=device
    )
    size = collectives.all_reduce_sum(size, mesh.loss_groups) / mesh.context.size()  # its ranks count the same text
    [loss] = means_of(check_finite(total)[None], count, name, "the limit")
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": total.item() / math.log(2) / max(size.item(), 1.0),
        "tokens": count.item(),
        "bytes": size.item(),
    }


class _TextBatches:
    """This rank's batches: as many on each rank."""

    def __init__(
        self, tokens: Shards, mesh: Mesh, seq_len: int, batch_size: int, separator: Separator | None, limit: int
    ) -> None:
        self.tokens, self.mesh, self.seq_len, self.batch_size, self.separator = (
            tokens,
            mesh,
            seq_len,
            batch_size,
            separator,
        )
        self.starts = np.arange(0, tokens.num_tokens - 1, seq_len)[: limit or None]
        self.num_batches = -(-len(self.starts) // (mesh.num_data_ranks * batch_size))
        self.num_tokens = min(tokens.num_tokens, len(self.starts) * seq_len + 1)

    def __iter__(self) -> Iterator[Batch]:
        local = self.starts[self.mesh.data_rank :: self.mesh.num_data_ranks]
        for number in range(self.num_batches):
            yield self._batch(local[number * self.batch_size : (number + 1) * self.batch_size])

    def _batch(self, starts: npt.NDArray[np.int64]) -> Batch:
        length = round_up(self.seq_len, sequence_multiple(self.mesh))
        tokens = np.zeros((self.batch_size, length + 1), np.int64)
        is_label = np.zeros((self.batch_size, length), bool)
        for row, start in enumerate(starts):
            size = min(self.seq_len + 1, self.tokens.num_tokens - int(start))
            tokens[row, :size] = self.tokens.read(starts[row : row + 1], size)
            mask = self.tokens.loss_mask(starts[row : row + 1], size)
            is_label[row, : size - 1] = True if mask is None else mask[0, 1:]
        inputs = {"tokens": tokens[:, :-1]}
        if self.separator:
            document_ids = separate_documents(tokens, self.separator)
            positions = positions_in_documents(document_ids)
            is_label &= document_ids[:, 1:] == document_ids[:, :-1]
            inputs |= {"position_ids": positions[:, :-1], "document_ids": document_ids[:, :-1]}
        else:
            inputs["position_ids"] = np.broadcast_to(np.arange(length), (self.batch_size, length))
        # Padding may lie past the last position that a model has.
        inputs["position_ids"] = np.minimum(inputs["position_ids"], self.seq_len - 1)
        local = context_position_ids(length, self.mesh.context).numpy()

        def tensor(values: npt.NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values[:, local]))

        labels = np.where(is_label, tokens[:, 1:], IGNORE)
        return Batch({name: tensor(values) for name, values in inputs.items()}, tensor(labels))


def _num_bytes(tokens: Shards, tokenizer: Tokenizer, mesh: Mesh, num_tokens: int) -> int:
    """Returns the size of the text of this rank's share of the documents, without prompts."""
    total = 0
    for number, (first, lengths) in enumerate(_groups(tokens, num_tokens)):
        if number % mesh.num_data_ranks == mesh.data_rank:
            start, size = np.array([first]), int(lengths.sum())
            values, mask = tokens.read(start, size)[0], tokens.loss_mask(start, size)
            for end, length in zip(lengths.cumsum(), lengths, strict=True):
                document = slice(end - length, end)
                text = values[document] if mask is None else values[document][mask[0, document]]
                total += len(tokenizer.decode(text.tolist()).encode())
    return total


def _groups(tokens: Shards, num_tokens: int) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """Yields consecutive documents: their offset, and their lengths. The last one is cut at `num_tokens`."""
    for shard, offset in zip(tokens.shards, tokens.offsets.tolist(), strict=False):
        if not shard.tokens or offset >= num_tokens:
            continue
        ends = offset + tokens.document_lengths(shard).cumsum()
        ends = np.append(ends[ends < num_tokens], min(int(ends[-1]), num_tokens))
        ends = np.unique(ends)
        groups = (ends - offset) // DECODED_TOKENS
        first = offset
        for group in np.unique(groups):
            group_ends = ends[groups == group]
            yield first, np.diff(group_ends, prepend=first)
            first = int(group_ends[-1])
