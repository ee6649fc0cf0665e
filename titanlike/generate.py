"""Text from a model: one token after another, each drawn from the model's own odds."""

import torch
from torch import Tensor, nn

from titanlike.data.tokenizer import Tokenizer
from titanlike.distributed import seed_of


@torch.no_grad()
def generate(
    model: nn.Module,
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

    The model always sees `window` places, so that compiled code fits; what stands behind the text does not matter to a
    causal model.
    """
    generator = torch.Generator().manual_seed(seed_of(seed, "sample"))
    tokens: list[int] = tokenizer.encode(prompt).tolist() or [tokenizer.end_of_text]
    for _ in range(num_tokens):
        seen = tokens[-window:]
        padded = torch.tensor([seen + [0] * (window - len(seen))], device=device)
        logits: Tensor = model(padded)[0, len(seen) - 1, : tokenizer.vocab_size].float().cpu()
        token = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
        if token == tokenizer.end_of_text:
            break
        tokens.append(token)
    return tokenizer.decode(tokens)
