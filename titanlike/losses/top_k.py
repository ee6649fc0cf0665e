"""The loss of distillation from the likeliest tokens of a teacher alone.

The two distributions of the KL divergence have K + 1 events: each of the teacher's K likeliest tokens, and all others together.
It is not larger than the divergence over the vocabulary, and equal to it if K is the vocabulary.

Shapes: N tokens of a micro-batch or a chunk, V vocabulary, or this rank's shard of it, K likeliest tokens.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from titanlike.losses import IGNORE
from titanlike.losses.chunked import Logits, first_token, reduced, slices, soft_capped

SMALLEST = 1e-30  # probability of all other tokens: its logarithm has to be finite


@dataclass(frozen=True)
class TopK:
    """The likeliest tokens of a teacher."""

    ids: Tensor  # (B, T, K)
    log_probs: Tensor  # (B, T, K + 1): at the temperature of the loss, of these and of all others together


def top_k_of(teacher: Logits, k: int, temperature: float, chunk: int, vocab_group: dist.ProcessGroup | None) -> TopK:
    """Returns the likeliest tokens of a batch, computed for `chunk` tokens at a time (0: all)."""
    x = teacher.x.flatten(0, -2)
    ids, log_probs = [], []
    for rows in slices(0, len(x), chunk):
        logits = soft_capped(replace(teacher, x=x[rows]).compute(), teacher.soft_cap) / temperature
        values, places = logits.topk(min(k, logits.shape[-1]))
        tokens = places + first_token(logits, vocab_group)
        if vocab_group is not None:
            values, tokens = (_gather(each, vocab_group) for each in (values, tokens))
            values, order = values.topk(k)
            tokens = tokens.gather(-1, order)
        largest = values[:, :1]
        others = (logits - largest).exp().masked_fill_(_is_among(tokens, logits, vocab_group), 0.0)
        rest = _sum(others, vocab_group)
        total = rest + (values - largest).exp().sum(-1, keepdim=True)
        found = torch.cat((values - largest, rest.clamp(min=SMALLEST).log()), -1) - total.log()
        ids.append(tokens)
        log_probs.append(found)
    shape = teacher.x.shape[:-1]
    return TopK(torch.cat(ids).view(*shape, k), torch.cat(log_probs).view(*shape, k + 1))


def top_k_loss(
    logits: Tensor,
    ids: Tensor,
    log_probs: Tensor,
    labels: Tensor,
    *,
    vocab_group: dist.ProcessGroup | None,
    reverse: bool,
    temperature: float,
    label_weight: float,
    soft_cap: float,
) -> tuple[Tensor, Tensor]:
    """Returns the gradient of the loss, and the sums (2,) of the KL divergence and of the cross-entropy over the valid labels (N,),
    for logits (N, V), tokens (N, K) and their log-probabilities (N, K + 1)."""
    dtype, valid = logits.dtype, (labels != IGNORE)[:, None]
    logits = logits.float()
    bound = (logits / soft_cap).tanh() if soft_cap else None
    logits = logits if bound is None else bound * soft_cap
    logits = logits - reduced(logits.amax(-1, keepdim=True), "max", vocab_group)
    label_lse = _sum(logits.exp(), vocab_group).log()
    scaled = logits / temperature
    probs = (scaled - _sum(scaled.exp(), vocab_group).log()).exp()
    first = first_token(logits, vocab_group)
    # Of tokens that another rank has, the place is one after the last.
    size = logits.shape[-1]
    places = (ids - first).where((ids >= first) & (ids < first + size), size)
    is_among = _is_among(ids, logits, vocab_group)
    kept = torch.cat((probs, probs.new_zeros(len(probs), 1)), -1).gather(-1, places)
    kept = reduced(kept, "sum", vocab_group)
    rest = _sum(probs.masked_fill(is_among, 0.0), vocab_group)
    student_probs = torch.cat((kept, rest), -1).clamp(min=SMALLEST)  # (N, K + 1)
    ratios = student_probs.log() - log_probs
    if reverse:
        divergence = (student_probs * ratios).sum(-1, keepdim=True)
        factors = ratios - divergence  # of the student's probabilities, in the gradient
    else:
        divergence = (log_probs.exp() * -ratios).sum(-1, keepdim=True)
        factors = 1.0 - (-ratios).exp()
    place_factors = factors[:, -1:].expand(-1, size + 1).scatter(-1, places, factors[:, :-1])[:, :size]
    gradient = probs * place_factors * (temperature * (1.0 - label_weight))
    is_label = torch.arange(first, first + size, device=labels.device) == labels[:, None]
    cross_entropy = label_lse - _sum(logits.where(is_label, 0.0), vocab_group)
    if label_weight:
        gradient = gradient + label_weight * ((logits - label_lse).exp() - is_label.float())
    if bound is not None:
        gradient = gradient * (1.0 - bound.square())
    sums = torch.cat((divergence, cross_entropy), -1).where(valid, 0.0).sum(0)
    return gradient.where(valid, 0.0).to(dtype), sums


def _sum(values: Tensor, vocab_group: dist.ProcessGroup | None) -> Tensor:
    return reduced(values.sum(-1, keepdim=True), "sum", vocab_group)


def _is_among(ids: Tensor, logits: Tensor, vocab_group: dist.ProcessGroup | None) -> Tensor:
    """Whether a column of logits (N, V) is one of the tokens (N, K)."""
    first, size = first_token(logits, vocab_group), logits.shape[-1]
    places = (ids - first).where((ids >= first) & (ids < first + size), size)
    found = torch.zeros(len(ids), size + 1, dtype=torch.bool, device=logits.device)
    return found.scatter(-1, places, torch.ones_like(places, dtype=torch.bool))[:, :size]


def _gather(values: Tensor, vocab_group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(values) for _ in range(vocab_group.size())]
    dist.all_gather(parts, values.contiguous(), group=vocab_group)
    return torch.cat(parts, -1)
