"""Log-likelihoods of continuations, under any layout.

Shapes: B sequences, T tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from titanlike.data.tokens.tokenizer import Tokenizer
from titanlike.distributed import collectives
from titanlike.inference.logits import check_finite, parallel_logits
from titanlike.parallelisms.mesh import Mesh

MIN_LENGTH = 32  # of a padded batch

Request = tuple[list[int], list[int]]  # tokens of a context, and of the continuation to score
Score = tuple[float, bool]  # log-likelihood of the continuation, and whether each of its tokens is the most likely one


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> Request:
    """Encodes a context and its continuation as one text, so that the tokens are the same as in the whole text.

    Spaces at the end of the context become part of the continuation. An empty context is the token that begins a document.
    """
    stripped = context.rstrip()
    continuation = context[len(stripped) :] + continuation
    if not stripped:
        return [prefix_token(tokenizer)], tokenizer.encode(continuation).tolist()
    whole, tokens = tokenizer.opening(stripped + continuation), tokenizer.opening(stripped)
    return tokens, whole[len(tokens) :]


def prefix_token(tokenizer: Tokenizer) -> int:
    """Returns the token before the first one of a document: BOS, or the one that ends the document before."""
    return tokenizer.separator.token if tokenizer.bos is None else tokenizer.bos


class Scorer:
    """Scores continuations with a model. The data-parallel ranks share the requests."""

    def __init__(self, model: nn.Module, mesh: Mesh, *, device: torch.device, max_length: int, batch_size: int) -> None:
        """Contexts are cut on the left to `max_length` tokens with the continuation; `batch_size` is per rank."""
        self.model, self.mesh, self.device = model, mesh, device
        self.max_length, self.batch_size = max_length, batch_size

    def __call__(
        self, requests: Sequence[Request], on_batch: Callable[[int, int], object] = lambda *_: None
    ) -> list[Score]:
        """Returns the score of each request. All ranks call it with the same requests and get the same scores.

        `on_batch` is called with the number of batches that this rank has scored, and the number of all its batches."""
        # Sequences of similar length are batched together.
        order = sorted(range(len(requests)), key=lambda index: -sum(map(len, requests[index])))
        scores = torch.zeros(len(requests), 2, dtype=torch.float64)
        batches = [order[first : first + self.batch_size] for first in range(0, len(order), self.batch_size)]
        # FSDP runs collectives in each forward pass: all ranks compute the same number of batches.
        rounds = -(-len(batches) // self.mesh.num_data_ranks)
        for number in range(self.mesh.data_rank, rounds * self.mesh.num_data_ranks, self.mesh.num_data_ranks):
            batch = batches[number] if number < len(batches) else []
            values = self._score([requests[index] for index in batch])
            if self.mesh.context.get_local_rank() == 0:  # all ranks of a context-parallel group have the same values
                scores[batch] = values[: len(batch)].cpu()
            on_batch(number // self.mesh.num_data_ranks + 1, rounds)
        scores = check_finite(collectives.all_reduce_sum(scores.to(self.device), self.mesh.loss_groups))
        return [(value, bool(is_greedy)) for value, is_greedy in scores.tolist()]

    def _score(self, requests: Sequence[Request]) -> Tensor:
        """Returns the log-likelihood and whether it is greedy (B, 2). Missing requests are padding."""
        rows = [(context + continuation)[-(self.max_length + 1) :] for context, continuation in requests]
        counts = [min(len(continuation), len(row) - 1) for (_, continuation), row in zip(requests, rows, strict=True)]
        length = self._padded_length(max((len(row) - 1 for row in rows), default=1))
        tokens = torch.zeros(self.batch_size, length + 1, dtype=torch.long)
        is_scored = torch.zeros(self.batch_size, length, dtype=torch.bool)
        for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
            tokens[index, : len(row)] = torch.tensor(row)
            is_scored[index, len(row) - 1 - count : len(row) - 1] = True
        tokens, is_scored = tokens.to(self.device), is_scored.to(self.device)
        labels = tokens[:, 1:]
        logits = parallel_logits(self.model, self.mesh, tokens[:, :-1])
        values = torch.zeros(self.batch_size, 2, dtype=collectives.sum_dtype(self.device), device=self.device)
        for index in range(len(rows)):  # a sequence at a time: float32 logits of all would be as large as the model
            chosen = logits[index, is_scored[index]].float()  # (T, V)
            expected = labels[index, is_scored[index]]
            logprobs = chosen.log_softmax(-1).gather(-1, expected[:, None])
            values[index, 0] = logprobs.to(values.dtype).sum()
            values[index, 1] = (chosen.argmax(-1) == expected).all()
        return values

    def _padded_length(self, length: int) -> int:
        """Returns one of few lengths, so that compiled code is reused."""
        padded = MIN_LENGTH
        while padded < length:
            padded *= 2
        return max(min(padded, self.max_length), length)
