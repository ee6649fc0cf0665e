"""Text from a model: one token after another, each drawn from the model's own odds."""

import torch
from torch import Tensor, nn

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
    prompt: str,
    *,
    num_tokens: int,
    window: int,
    temperature: float,
    seed: int,
    device: torch.device,
) -> str:
    """The prompt and what follows it. Every rank calls it and gets the same text: a sharded model needs them all.

    The model looks back over `window` places, on any layout. It is always given as many, `window` or what divides over the
    ranks that share a sequence, so that compiled code fits; what stands behind the text does not matter to a causal model.
    """
    unit = mesh.tensor.size() * (2 * mesh.context.size() if mesh.context.size() > 1 else 1)
    length = -(-window // unit) * unit
    places = context_position_ids(length, mesh.context).to(device)
    generator = torch.Generator().manual_seed(derive_seed(seed, "sample"))
    tokens = tokenizer.opening(prompt)
    for _ in range(num_tokens):
        seen = tokens[-window:]
        padded = torch.tensor([seen + [0] * (length - len(seen))], device=device)
        logits: Tensor = model(tokens=padded[:, places], position_ids=places[None])
        logits = gather_sequence(logits, 1, mesh.context)[:, len(seen) - 1]  # (1, vocabulary)
        if mesh.vocab_group is not None:
            logits = all_gather(logits, 1, mesh.vocab_group)
        logits = logits[0, : tokenizer.vocab_size].float().cpu()
        token = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
        if token == tokenizer.separator.token:
            break
        tokens.append(token)
    return tokenizer.decode(tokens)
