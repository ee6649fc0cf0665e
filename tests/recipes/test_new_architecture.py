"""The architecture of docs/extending.md, registered from outside of the package, trains under tensor x pipeline parallelism, and
starts from a Hugging Face folder as docs/hugging_face.md says."""

import json
import shlex
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.launching import ROOT, python, run
from tests.programs import blocks, edited, verify

CONFIG, MODEL = (text for text in blocks(ROOT / "docs/extending.md", "python") if "MyConfig" in text)
MEMBERS, LOGITS = (text for text in blocks(ROOT / "docs/hugging_face.md", "python") if "My" in text or "my_" in text)
(COMMAND,) = (text for text in blocks(ROOT / "docs/hugging_face.md") if "my_model" in text)


def write_program(folder: Path) -> str:
    """Writes the architecture, a copy of the shipped program that imports it, and a recipe. Returns the recipe's name."""
    (folder / "my_config.py").write_text(CONFIG)
    (folder / "my_model.py").write_text(MODEL)
    program = edited(
        (ROOT / "recipes/pretrain.py").read_text(),
        (
            "from titanlike.recipe import PretrainRecipe\n",
            "from my_config import MyRecipe as PretrainRecipe\n",
        ),
        ("import torch\n", "import my_model\nimport torch\n"),
    )
    (folder / "mine.py").write_text(program)
    (folder / "mine.toml").write_text(
        'program = "mine"\n[training]\nseq_len = 64\nglobal_batch_size = 8\nlocal_batch_size = 1\n[compile]\nmode = "none"\n'
    )
    return "mine.toml"


def test_a_registered_architecture_is_checked_and_matches_one_process(tmp_path: Path) -> None:
    done = verify(tmp_path, write_program(tmp_path), "--layout", "tensor=2,pipeline=2", "--steps", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("\nequal within tolerance\n")
    refused = run(tmp_path, "mine.toml", "--model.ffn_dim=95", "--parallelism.tensor=2", "--check", "2")
    assert refused.returncode == 2
    assert refused.stderr == "error: parallelism.tensor = 2 does not divide model.ffn_dim = 95; use 1\n"


def logits_of(stored: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """The model in another program: parallel attention with four heads and squared ReLU."""
    h = stored["model.embed_tokens.weight"][tokens]
    for index in range(4):
        block = {n.removeprefix(p): w for n, w in stored.items() if n.startswith(p := f"model.layers.{index}.")}
        x = F.rms_norm(h, h.shape[-1:], block["input_layernorm.weight"], 1e-5)
        q, k, v = (
            F.linear(x, block[f"self_attn.{n}_proj.weight"]).unflatten(-1, (4, -1)).transpose(1, 2)
            for n in ("q", "k", "v")
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        hidden = F.linear(x, block["mlp.up_proj.weight"]).relu().square()
        h = h + F.linear(attended, block["self_attn.o_proj.weight"]) + F.linear(hidden, block["mlp.down_proj.weight"])
    return F.linear(F.rms_norm(h, h.shape[-1:], stored["model.norm.weight"], 1e-5), stored["lm_head.weight"])


@pytest.mark.slow
def test_a_registered_architecture_starts_from_the_weights_of_another_program(tmp_path: Path) -> None:
    write_program(tmp_path)
    _, _, members = MEMBERS.partition("# add to the class\n")
    config = edited(CONFIG, ("    def block_parameters(self):\n", f"{members}\n    def block_parameters(self):\n"))
    (tmp_path / "my_config.py").write_text("import dataclasses\n" + config)
    shapes = {"self_attn.q_proj": (64, 64), "self_attn.k_proj": (64, 64), "self_attn.v_proj": (64, 64)}
    shapes |= {
        "self_attn.o_proj": (64, 64),
        "mlp.up_proj": (96, 64),
        "mlp.down_proj": (64, 96),
        "input_layernorm": (64,),
    }
    names = {f"model.layers.{i}.{name}.weight": shape for i in range(4) for name, shape in shapes.items()}
    names |= {"model.embed_tokens.weight": (320, 64), "model.norm.weight": (64,), "lm_head.weight": (320, 64)}
    torch.manual_seed(0)
    stored = {name: 0.2 * torch.randn(shape) for name, shape in names.items()}
    (tmp_path / "old").mkdir()
    save_file(stored, tmp_path / "old/model.safetensors")
    sizes = dict(dim=64, num_layers=4, num_heads=4, ffn_dim=96, vocab_size=320, max_seq_len=512)
    (tmp_path / "old/config.json").write_text(
        json.dumps({"architectures": ["MineForCausalLM"], "name": "mine"} | sizes)
    )

    check = f"import torch\ntorch.set_printoptions(precision=8)\n{LOGITS}torch.save(model(torch.arange(64)[None]), 'logits.pt')\n"
    (tmp_path / "check.py").write_text(check)
    done = python(tmp_path, "check.py")
    assert done.returncode == 0 and done.stdout.startswith("tensor(["), done.stderr
    expected = logits_of(stored, torch.arange(64)[None])
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt").detach(), expected, rtol=1e-5, atol=1e-5)

    options = {"checkpoint.initial": "old", "run.name": "NAME", "training.steps": "1", "optimizer.lr": "1e-12"}
    options |= {
        "schedule.warmup_steps": "0",
        "validation.interval": "0",
        "data.source": "python_stdlib",
        "run.device": "cpu",
    }
    done = run(tmp_path, "mine.toml", **options, **{"training.compute_dtype": "float32", "sample.tokens": "0"})
    assert done.returncode == 0, done.stderr
    _, _, _, code, *words = shlex.split(COMMAND)
    (tmp_path / "export.py").write_text(code)
    done = python(tmp_path, "export.py", *words)
    assert done.returncode == 0, done.stderr
    exported = load_file(tmp_path / "model/model-00001-of-00001.safetensors")
    assert exported.keys() == stored.keys()
    for name, value in stored.items():
        torch.testing.assert_close(exported[name], value, rtol=1e-5, atol=1e-5)
