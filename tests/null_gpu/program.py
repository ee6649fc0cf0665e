"""A loop with two planted faults, for the record of a null GPU: it reads the loss and keeps a tensor in every step."""

import torch
import torch.nn.functional as F

kept = []


@torch.compile
def gate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Becomes one generated kernel."""
    return F.silu(x) * y


def step(weight: torch.Tensor, optimizer: torch.optim.Optimizer) -> float:
    """Trains one step."""
    x = torch.ones(256, 512, dtype=torch.bfloat16, device="cuda")
    q = gate(x @ weight, x).view(1, 8, 256, 64)
    loss = F.scaled_dot_product_attention(q, q, q, is_causal=True).float().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    kept.append(torch.empty(2**20, dtype=torch.uint8, device="cuda"))  # leak
    return loss.item()  # synchronization


if __name__ == "__main__":
    assert torch.tensor([1, 2, 3], device="cuda").tolist() == [1, 2, 3]
    matrix = torch.ones(512, 512, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    adamw = torch.optim.AdamW([matrix], fused=True)
    for _ in range(5):
        step(matrix, adamw)
    try:
        torch.empty(80 * 2**30, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        print(error)
