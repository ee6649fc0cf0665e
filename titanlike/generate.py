"""Autoregressive sampling from a model under any layout."""

import torch
from torch import Tensor, nn

from titanlike.config.sections import Sample
from titanlike.data.text.tokenizer import Tokenizer
from titanlike.distributed.collectives import all_gather
from titanlike.parallelisms.context import context_position_ids, gather_sequence
from titanlike.parallelisms.mesh import Mesh
from titanlike.utils.counter_rng import derive_seed


@torch.no_grad()
def generate(
    model: nn.Module,
    mesh: Mesh,
    tokenizer: Tokenizer,
    sample: Sample,
    *,
    context_length: int,
    seed: int,
) -> str:
    """Returns the prompt and up to `sample.tokens` sampled tokens, as text. All ranks call it and get the same text.

    The model always gets `context_length` tokens, rounded up to what the layout divides, so that compiled code is reused. Padding
    follows the text, where a causal model does not see it.
    """
    multiple = mesh.tensor.size() * (2 * mesh.context.size() if mesh.context.size() > 1 else 1)
    length = -(-context_length // multiple) * multiple
    device = torch.device(mesh.tensor.device_type)
    position_ids = context_position_ids(length, mesh.context).to(device)
    generator = torch.Generator().manual_seed(derive_seed(seed, "sample"))
    tokens = tokenizer.opening(sample.prompt)
    for _ in range(sample.tokens):
        context = tokens[-context_length:]
        padded = torch.tensor([context + [0] * (length - len(context))], device=device)
        logits: Tensor = model(tokens=padded[:, position_ids], position_ids=position_ids[None])
        logits = gather_sequence(logits, 1, mesh.context)[:, len(context) - 1]  # (1, V)
        if mesh.vocab_group is not None:
            logits = all_gather(logits, 1, mesh.vocab_group)
        logits = logits[0, : tokenizer.vocab_size].float().cpu()
        token = int(torch.multinomial((logits / sample.temperature).softmax(-1), 1, generator=generator))
        if token == tokenizer.separator.token:
            break
        tokens.append(token)
    return tokenizer.decode(tokens)
