"""Train a tiny model by the shipped program, under any layout, and read what came of it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from recipes.pretrain import main
from tests.pool import Pool
from titanlike.config import PretrainRecipe
from titanlike.config.models import GPT, Llama
from titanlike.models import build_model

LLAMA = Llama(dim=64, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=96, vocab_size=320)
GPT_ = GPT(dim=64, num_layers=3, num_heads=4, vocab_size=320)
MODELS = {"llama": LLAMA, "gpt": GPT_}

TINY: dict[str, dict[str, Any]] = dict(
    data=dict(source="synthetic"),
    training=dict(steps=5, seq_len=32, global_batch_size=8, local_batch_size=1, compute_dtype="float32"),
    # Adam divides a gradient by its own size. Where the true gradient is 0 (a key's bias: softmax does not see it), that
    # makes a full step of rounding noise; this eps keeps noise small beside gradients of 1e-3 and more.
    optimizer=dict(lr=1e-2, eps=1e-4),
    schedule=dict(warmup_steps=2),
    compile=dict(mode="none"),
    validation=dict(interval=5, batches=2),
    metrics=dict(interval=1, tensorboard=False),
)


def tiny(folder: Path, name: str, **sections: Any) -> PretrainRecipe:
    """A recipe for a moment's training. Sections are dictionaries of what differs, or whole sections."""
    merged: dict[str, Any] = {**TINY, "run": dict(dir=str(folder), name=name), "model": LLAMA}
    for section, value in sections.items():
        merged[section] = merged.get(section, {}) | value if isinstance(value, dict) else value
    base = PretrainRecipe()
    made = {k: dataclasses.replace(getattr(base, k), **v) if isinstance(v, dict) else v for k, v in merged.items()}
    return dataclasses.replace(base, **made)


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run leaves behind."""

    losses: list[float]
    grad_norms: list[float]
    validation: list[float]
    state: dict[str, dict[str, Tensor]]  # "model" and "optimizer", whole tensors by name

    @property
    def weights(self) -> dict[str, Tensor]:
        return self.state["model"]


def _train(recipe: PretrainRecipe) -> None:
    main(recipe, torch.device("cpu"))


def train(pool: Pool, recipe: PretrainRecipe) -> Result:
    """Run the program on all ranks of the pool."""
    pool.run(_train, recipe)
    return result(recipe)


def result(recipe: PretrainRecipe) -> Result:
    """Read a run's metrics and its last checkpoint."""
    folder = Path(recipe.run.dir, recipe.run.name)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    return Result(
        losses=[record["loss"] for record in steps],
        grad_norms=[record["grad_norm"] for record in steps],
        validation=[record["validation_loss"] for record in records if "validation_loss" in record],
        state=whole_state(sorted((folder / "checkpoints").iterdir())[-1], recipe),
    )


def whole_state(checkpoint: Path, recipe: PretrainRecipe) -> dict[str, dict[str, Tensor]]:
    """A checkpoint's tensors without any layout."""
    with torch.device("meta"):
        names = {name: parameter.shape for name, parameter in build_model(recipe.model).named_parameters()}
    state = {
        "model": {name: torch.empty(shape) for name, shape in names.items()},
        "optimizer": {
            f"state.{name}.{moment}": torch.empty(shape)
            for name, shape in names.items()
            for moment in ("exp_avg", "exp_avg_sq")
        },
    }
    dcp.load(state, storage_reader=dcp.FileSystemReader(checkpoint), no_dist=True)
    return state


def assert_same(one: Result, other: Result, *, loss: float = 1e-5, norm: float = 1e-4, weights: float = 1e-4) -> None:
    """Losses, gradient norms, validation and every weight agree to these relative tolerances."""
    torch.testing.assert_close(torch.tensor(one.losses), torch.tensor(other.losses), rtol=loss, atol=0)
    torch.testing.assert_close(torch.tensor(one.grad_norms), torch.tensor(other.grad_norms), rtol=norm, atol=0)
    torch.testing.assert_close(torch.tensor(one.validation), torch.tensor(other.validation), rtol=loss, atol=0)
    assert one.weights.keys() == other.weights.keys()
    for name, value in one.weights.items():
        # A weight that has stayed near 0 is compared with one step of the optimizer.
        scale = max(value.abs().max().item(), TINY["optimizer"]["lr"])
        worst = (value - other.weights[name]).abs().max().item() / scale
        assert worst <= weights, f"{name} differs by {worst:.1e} of its largest value"
