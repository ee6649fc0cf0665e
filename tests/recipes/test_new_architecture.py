"""The architecture of docs/extending.md, registered from outside of the package, trains under tensor x pipeline parallelism."""

from pathlib import Path

from tests.launching import ROOT, run
from tests.programs import blocks, edited, verify

CONFIG, MODEL = (text for text in blocks(ROOT / "docs/extending.md", "python") if "MyConfig" in text)


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
