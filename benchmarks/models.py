"""The models and batch sizes of `benchmarks/run.py`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.protocol import Task
from titanlike.models.gpt.config import GPTConfig
from titanlike.models.llama.config import LlamaConfig

FILES = {"batches": "npy", "tokens": "npy", "weights": "pt"}  # of a task


@dataclass(frozen=True)
class Model:
    """A model config by titanlike's names, and the batch of a step."""

    config: dict[str, Any]
    seq_len: int
    batch_size: int  # sequences per step
    micro_batch_size: int  # sequences per forward pass, by default
    # Low enough for a stable start, in which rounding does not make the losses of the subjects diverge.
    lr: float = 1e-3

    def task(self, folder: Path = Path(), micro_batch: int | None = None, **fields: Any) -> Task:
        """Returns a task, by default with the subject and row of none, and files in a folder."""
        files = {f"{name}_file": str(folder / f"{name}.{kind}") for name, kind in FILES.items()}
        fields = {"subject": "", "row": "", "micro_batch_size": micro_batch or self.micro_batch_size} | files | fields
        return Task(model=self.config, seq_len=self.seq_len, batch_size=self.batch_size, lr=self.lr, **fields)


def llama(**fields: Any) -> dict[str, Any]:
    """Returns a Llama config with every field that a subject may read."""
    defaults = dict(norm_eps=1e-5, rope_theta=500000.0, rope_scaling=1.0, rope_original_seq_len=8192, tied_head=False)
    return {"name": "llama", **defaults, **fields}


MODELS = {
    # To rehearse the benchmarks.
    "cpu_tiny": Model(
        llama(dim=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=128, vocab_size=320, max_seq_len=32),
        seq_len=32, batch_size=2, micro_batch_size=2,
    ),
    # For two CPU cores.
    "cpu_6m": Model(
        llama(dim=256, num_layers=6, num_heads=4, num_kv_heads=4, ffn_dim=768, vocab_size=4096, max_seq_len=256),
        seq_len=256, batch_size=8, micro_batch_size=8, lr=5e-4,
    ),
    "cpu_50m": Model(
        llama(dim=512, num_layers=10, num_heads=8, num_kv_heads=8, ffn_dim=1536, vocab_size=16384, max_seq_len=512),
        seq_len=512, batch_size=4, micro_batch_size=4, lr=3e-4,
    ),
    # For one GPU.
    "gpt2_124m": Model(
        dict(name="gpt", dim=768, num_layers=12, num_heads=12, vocab_size=50304, max_seq_len=1024),
        seq_len=1024, batch_size=64, micro_batch_size=64,
    ),
    "llama3_1b": Model(
        llama(dim=2048, num_layers=16, num_heads=32, num_kv_heads=8, ffn_dim=8192, vocab_size=128256,
              max_seq_len=8192, rope_scaling=32.0, tied_head=True),
        seq_len=8192, batch_size=4, micro_batch_size=2, lr=2e-5,
    ),
    "llama3_8b_8layers": Model(
        llama(dim=4096, num_layers=8, num_heads=32, num_kv_heads=8, ffn_dim=14336, vocab_size=128256, max_seq_len=8192),
        seq_len=8192, batch_size=2, micro_batch_size=2, lr=1e-5,
    ),
}  # fmt: skip


def config_of(model: Model) -> LlamaConfig | GPTConfig:
    """Returns the model as a titanlike config."""
    return (LlamaConfig if model.config["name"] == "llama" else GPTConfig)(**model.config)
