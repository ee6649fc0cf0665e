"""Runs of `recipes/mlm.py`: the debug recipe learns, and its model has in transformers the accuracy that the
run recorded. What needs the next token is refused."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForMaskedLM

from tests.launching import ROOT, SMALL, python, recorded, run
from tests.recipes.held_out import opened
from titanlike.losses import IGNORE
from titanlike.recipe.mlm import MlmRecipe

DEBUG = str(ROOT / "train_configs/mlm_debug.toml")
TINY = {name: value for name, value in SMALL.items() if name not in ("model.num_kv_heads",)} | {
    "training.steps": "8", "validation.interval": "8", "model.sliding_window": "10",
}  # fmt: skip


@pytest.mark.every
def test_the_debug_recipe_learns_to_predict_masked_tokens(tmp_path: Path) -> None:
    done = run(tmp_path, DEBUG, **{"run.name": "run", "metrics.trackers": "[]", "training.steps": "60"})
    assert done.returncode == 0, done.stderr
    values = recorded(tmp_path / "runs/run", "validation_loss")
    assert values[-1] < values[0] - 0.3
    assert recorded(tmp_path / "runs/run", "validation_accuracy")[-1] > 0.33
    assert "titanlike generate" not in done.stdout and "15% of the tokens masked" in done.stdout


@pytest.mark.slow
def test_a_run_is_read_by_transformers(tmp_path: Path) -> None:
    whole = run(
        tmp_path, DEBUG, variables={"TITANLIKE_BATCH_RECORD": str(tmp_path)},
        **TINY | {"run.name": "whole", "checkpoint.export": "float32"},
    )  # fmt: skip
    assert whole.returncode == 0, whole.stderr
    _, held_out = opened(MlmRecipe, tmp_path / "runs/whole", tmp_path)
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "runs/whole/hf").eval()
    losses, correct, count = 0.0, 0, 0
    for batch in held_out:
        is_label = batch.labels != IGNORE
        with torch.no_grad():
            logits, labels = model(batch.inputs["tokens"]).logits[is_label], batch.labels[is_label]
        losses += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
        correct, count = correct + int((logits.argmax(-1) == labels).sum()), count + len(labels)
    last = [recorded(tmp_path / "runs/whole", f"validation_{name}")[-1] for name in ("loss", "accuracy")]
    assert last == [pytest.approx(losses / count, rel=1e-5), pytest.approx(correct / count, abs=1e-9)]
    for command in (["generate", "runs/whole", "--prompt", "def "], ["evaluate", "runs/whole", "--data", DEBUG]):
        refused = python(tmp_path, "-m", "titanlike.tools.cli.main", *command)
        assert refused.returncode == 2
        assert "model.name = 'modernbert' is an encoder: it predicts masked tokens, and neither" in refused.stderr
    imported = python(tmp_path, "-m", "titanlike.tools.cli.main", "import", "runs/whole/hf", "again.toml")
    assert imported.returncode == 0, imported.stderr
    small = {
        "data.path": DEBUG,
        "training.seq_len": "16",
        "training.global_batch_size": "2",
        "training.local_batch_size": "2",
    }
    small |= {
        "training.steps": "2",
        "training.compute_dtype": "float32",
        "compile.mode": "none",
        "validation.interval": "0",
    }
    again = run(tmp_path, "again.toml", **small, **{"schedule.warmup_steps": "0", "metrics.trackers": "[]"})
    assert again.returncode == 0, again.stderr
