"""Reference: Llama or GPT and a training loop, hand-written for one process with torch only.

row "shipped"   not compiled
row "best"      with torch.compile on the full model
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.protocol import Clock, Task


class Block(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        dim, self.heads = config["dim"], config["num_heads"]
        self.llama = config["name"] == "llama"
        self.kv_heads = config["num_kv_heads"] if self.llama else self.heads
        self.head_dim = dim // self.heads
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        ffn_dim = config["ffn_dim"] if self.llama else 4 * dim
        self.attention_norm, self.ffn_norm = norm(config), norm(config)
        bias = not self.llama
        self.wq, self.wk = nn.Linear(dim, width, bias=bias), nn.Linear(dim, kv_width, bias=bias)
        self.wv, self.wo = nn.Linear(dim, kv_width, bias=bias), nn.Linear(width, dim, bias=bias)
        self.w1, self.w2 = nn.Linear(dim, ffn_dim, bias=bias), nn.Linear(ffn_dim, dim, bias=bias)
        self.w3 = nn.Linear(dim, ffn_dim, bias=False) if self.llama else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        h = self.attention_norm(x)
        q = self.wq(h).view(batch, length, self.heads, self.head_dim).transpose(1, 2)
        k = self.wk(h).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(h).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        if self.llama:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        x = x + self.wo(h.transpose(1, 2).reshape(batch, length, -1))
        h = self.ffn_norm(x)
        if self.w3 is not None:
            return x + self.w2(F.silu(self.w1(h)) * self.w3(h))
        return x + self.w2(F.gelu(self.w1(h), approximate="tanh"))


class Model(nn.Module):
    def __init__(self, config: dict, length: int) -> None:
        super().__init__()
        self.llama = config["name"] == "llama"
        self.embed = nn.Embedding(config["vocab_size"], config["dim"])
        self.pos_embed = None if self.llama else nn.Embedding(config["max_seq_len"], config["dim"])
        self.layers = nn.ModuleList(Block(config) for _ in range(config["num_layers"]))
        self.norm = norm(config)
        self.head = nn.Linear(config["dim"], config["vocab_size"], bias=False)
        if config.get("tied_head", not self.llama):
            self.head.weight = self.embed.weight
        half = config["dim"] // config["num_heads"] // 2
        frequencies = config.get("rope_theta", 500000.0) ** -(torch.arange(half) / half)
        factor = config.get("rope_scaling", 1.0)
        rotations = config.get("rope_original_seq_len", 8192) * frequencies / (2 * torch.pi)
        keep = ((rotations - 1) / 3).clamp(0, 1) if factor != 1.0 else torch.ones(())
        angles = torch.arange(length)[:, None] * (frequencies * (keep + (1 - keep) / factor))
        angles = torch.cat((angles, angles), -1)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        h = self.embed(tokens)
        if self.pos_embed is not None:
            h = h + self.pos_embed(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            h = layer(h, self.cos, self.sin)
        logits = self.head(self.norm(h))
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def norm(config: dict) -> nn.Module:
    kind = nn.RMSNorm if config["name"] == "llama" else nn.LayerNorm
    return kind(config["dim"], eps=config.get("norm_eps", 1e-5))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


def renamed(name: str) -> str:
    """Maps titanlike's name of a weight to this model's."""
    for old, new in (("tok_embeddings", "embed"), ("pos_embeddings", "pos_embed"), ("output", "head")):
        name = name.replace(old, new)
    return name.replace("attention.", "").replace("feed_forward.", "")


def main() -> None:
    task = Task.read()
    clock = Clock(task)
    device = torch.device(task.device)
    with device:
        model = Model(task.model, task.seq_len)
    model.load_state_dict({renamed(name): value for name, value in task.weights.items()}, strict=False)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    not_decayed = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": task.weight_decay}, {"params": not_decayed, "weight_decay": 0.0}],
        lr=task.lr, betas=(task.beta1, task.beta2), eps=task.eps, fused=True,
    )  # fmt: skip
    compute = torch.compile(model) if task.row == "best" else model
    step = 0
    while True:
        step += 1
        loss = torch.zeros((), device=device)
        for tokens, labels in task.batch(step):
            with torch.autocast(device.type, torch.bfloat16, enabled=task.precision != "float32"):
                mean = compute(tokens, labels) / task.num_microbatches
            mean.backward()
            loss += mean.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), task.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        clock.step(loss)


if __name__ == "__main__":
    main()
