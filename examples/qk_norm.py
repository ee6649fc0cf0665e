"""QK-norm in a Llama, registered from outside of the package, with all transforms, compared with one process.

torchrun --nproc-per-node=4 examples/qk_norm.py
"""

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlike.config import UserError
from titanlike.config.sections import ActivationCheckpoint, Compile, Float8, Parallelism, Training, section
from titanlike.distributed.process_group import session
from titanlike.models.common.config import ParameterSpec
from titanlike.models.common.init import initialize
from titanlike.models.llama.config import LlamaConfig
from titanlike.models.llama.model import Attention, Llama
from titanlike.models.registry import build_model, register_model
from titanlike.parallelisms.mesh import Mesh, build_mesh
from titanlike.parallelize import parallelize


@section
class QKNormConfig(LlamaConfig):
    """Llama with normalized queries and keys."""

    name: Literal["qk_norm"] = "qk_norm"  # type: ignore[assignment]
    """Architecture."""

    def block_parameters(self) -> dict[str, ParameterSpec]:
        """Adds the two norms, with their tensor-parallel style."""
        norms = ("attention.query_norm.weight", "attention.key_norm.weight")
        return super().block_parameters() | dict.fromkeys(norms, ParameterSpec((self.head_dim,), "replicated"))


class QKNormAttention(Attention):
    """Attention that normalizes the heads of queries and keys."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.query_norm, self.key_norm = (nn.RMSNorm(config.head_dim, eps=config.norm_eps) for _ in range(2))

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().heads(x)
        return self.query_norm(q), self.key_norm(k), v


@register_model(QKNormConfig)
class QKNormLlama(Llama):
    """Llama with that attention. `init_parameter` sets weights whose names end with "norm.weight" to 1."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for block in self.layers.values():
            block.attention = QKNormAttention(config)


CONFIG = QKNormConfig(dim=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=96, vocab_size=320)


def build(mesh: Mesh | None) -> nn.Module:
    """Builds the model, with its initial weights, on this rank of a mesh, or in one process."""
    with torch.device("meta"):
        model = build_model(CONFIG)
    if mesh is not None:
        model = parallelize(
            model, mesh, split=[CONFIG.num_layers], training=Training(compute_dtype="float32"), parallelism=Parallelism(),
            float8=Float8(), activation_checkpoint=ActivationCheckpoint(mode="full"), compile=Compile(mode="none"),
        )  # fmt: skip
    initialize(model, torch.device("cpu"), seed=0)
    return model


def main() -> float:
    """Returns the largest relative difference of a norm's gradient, or of the loss, from one process."""
    mesh = build_mesh("cpu", shard=dist.get_world_size() // 2, tensor=2)
    tokens = torch.randint(0, CONFIG.vocab_size, (4, 33), generator=torch.Generator().manual_seed(0))
    results = []
    for model, batch in ((build(mesh), tokens.chunk(mesh.num_data_ranks)[mesh.data_rank]), (build(None), tokens)):
        loss = model(batch[:, :-1], labels=batch[:, 1:].contiguous()) / tokens[:, 1:].numel()
        loss.backward()
        gradients = [p.grad for name, p in model.named_parameters() if "_norm" in name and p.grad is not None]
        results.append((loss.detach(), [getattr(g, "full_tensor", lambda g=g: g)() for g in gradients]))
    (loss, found), (expected_loss, expected) = results
    dist.all_reduce(loss, group=mesh.fsdp.get_group())
    assert sum(p.numel() for p in build(None).parameters()) == CONFIG.num_parameters()
    worst = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, expected, strict=True)]
    return max(*worst, (loss / expected_loss - 1).abs().item())


if __name__ == "__main__":
    with session("cpu"):
        if dist.get_world_size() % 2:
            raise UserError("start an even number of processes: torchrun --nproc-per-node=4 examples/qk_norm.py")
        difference = main()
        print(f"largest relative difference from one process: {difference:.1e}")
        assert difference < 1e-4
