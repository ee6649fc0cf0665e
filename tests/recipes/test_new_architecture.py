"""A third architecture, registered from outside of the package, trains under tensor x pipeline parallelism."""

from pathlib import Path

from tests.launching import ROOT, run
from tests.programs import edited, verify

CONFIG = '''
from typing import Literal

from titanlike.recipe import PretrainRecipe
from titanlike.config import section
from titanlike.config.base import Positive
from titanlike.models.common.config import ParameterSpec, TransformerConfig


@section
class ParallelConfig(TransformerConfig):
    """Parallel attention and feed-forward, multi-query attention, squared ReLU, no position embedding."""

    name: Literal["parallel"] = "parallel"
    """Architecture."""
    dim: Positive = 64
    """Model dimension."""
    num_layers: Positive = 4
    """Number of blocks."""
    num_heads: Positive = 4
    """Number of heads."""
    hidden_dim: Positive = 96
    """Hidden dimension of the feed-forward layers."""
    vocab_size: Positive = 320
    """Vocabulary."""
    max_seq_len: Positive = 512
    """Maximum sequence length."""

    def block_parameters(self):
        projections = ("attention.wq.weight", "attention.wk.weight", "attention.wv.weight")
        return {
            "norm.weight": ParameterSpec((self.dim,), "sequence_parallel"),
            **dict.fromkeys(projections, ParameterSpec((self.dim, self.dim), "colwise")),
            "attention.wo.weight": ParameterSpec((self.dim, self.dim), "rowwise"),
            "feed_forward.w1.weight": ParameterSpec((self.hidden_dim, self.dim), "colwise"),
            "feed_forward.w2.weight": ParameterSpec((self.dim, self.hidden_dim), "rowwise"),
        }

    def tensor_parallel_sizes(self):
        return super().tensor_parallel_sizes() | {"hidden_dim": self.hidden_dim}


@section
class ParallelRecipe(PretrainRecipe):
    """A recipe for this architecture."""

    model: ParallelConfig = ParallelConfig()
'''

MODEL = """
from torch import nn

from parallel_config import ParallelConfig
from titanlike.models.registry import register_model
from titanlike.models.common.document_mask import DocumentMask
from titanlike.models.common.layers import DotProductAttention, LMHead


@register_model(ParallelConfig)
class ParallelModel(nn.Module):
    first_stage_modules = ("tok_embeddings",)
    last_stage_modules = ("norm", "output")

    def __init__(self, config):
        super().__init__()
        self.tensor_plan = config.tensor_plan()
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.document_mask = DocumentMask()
        self.layers = nn.ModuleDict({str(index): Block(config) for index in range(config.num_layers)})
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.output = LMHead(config.dim, config.vocab_size, bias=False)

    def forward(self, tokens, position_ids=None, document_ids=None, dropout_bits=None, labels=None):
        h = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        mask = self.document_mask(document_ids)
        for block in self.layers.values():
            h = block(h, mask)
        h = h if self.norm is None else self.norm(h)
        return h if self.output is None else self.output(h, labels)

    def init_parameter(self, name, value, generator):
        value.fill_(1.0) if "norm" in name else value.normal_(0.0, 0.02, generator=generator)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)

    def forward(self, x, mask):
        h = self.norm(x)
        return x + self.attention(h, mask) + self.feed_forward(h)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.head_dim = config.head_dim
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(config.dim, config.dim, bias=False) for _ in range(4))
        self.attend = DotProductAttention()

    def forward(self, x, mask):
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        return self.wo(self.attend(q, k, v, mask).transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.w2 = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x):
        return self.w2(self.w1(x).relu().square())
"""


def write_program(folder: Path) -> str:
    """Writes the architecture, a copy of the shipped program that imports it, and a recipe. Returns the recipe's name."""
    (folder / "parallel_config.py").write_text(CONFIG)
    (folder / "parallel_model.py").write_text(MODEL)
    program = edited(
        (ROOT / "recipes/pretrain.py").read_text(),
        (
            "from titanlike.recipe import PretrainRecipe\n",
            "from parallel_config import ParallelRecipe as PretrainRecipe\n",
        ),
        ("import torch\n", "import parallel_model\nimport torch\n"),
    )
    (folder / "parallel.py").write_text(program)
    (folder / "parallel.toml").write_text(
        'program = "parallel"\n[training]\nseq_len = 64\nglobal_batch_size = 8\nlocal_batch_size = 1\n[compile]\nmode = "none"\n'
    )
    return "parallel.toml"


def test_a_registered_architecture_is_checked_and_matches_one_process(tmp_path: Path) -> None:
    done = verify(tmp_path, write_program(tmp_path), "--layout", "tensor=2,pipeline=2", "--steps", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("\nequal within tolerance\n")
    refused = run(tmp_path, "parallel.toml", "--model.hidden_dim=95", "--parallelism.tensor=2", "--check", "2")
    assert refused.returncode == 2
    assert refused.stderr == "error: parallelism.tensor = 2 does not divide model.hidden_dim = 95; use 1\n"
