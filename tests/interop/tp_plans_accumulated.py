"""The same models, with a backward pass for each of two micro-batches."""

import torch
from torch import Tensor, nn
from tp_plans import batch as batch
from tp_plans import gpt_oss as gpt_oss
from tp_plans import llama as llama
from tp_plans import mixtral as mixtral
from tp_plans import qwen3 as qwen3
from tp_plans import qwen3_tied as qwen3_tied


def backward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    losses = []
    for tokens in batch["input_ids"].chunk(2):
        loss = model(input_ids=tokens, labels=tokens).loss / 2
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()
