"""Runs of `recipes/mlm.py`: the debug recipe learns, and its model has in transformers the accuracy that the
run recorded. What needs the next token is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForMaskedLM

from tests.launching import ROOT, SMALL, python, records, run
from titanlike.config.load import load
from titanlike.config.mlm import MlmRecipe
from titanlike.data.batches import openers
from titanlike.data.batches.loader import BatchLoader
from titanlike.data.tokens.tokenizer import build_tokenizer
from titanlike.models.loss import IGNORE

DEBUG = str(ROOT / "train_configs/mlm_debug.toml")
TINY = {name: value for name, value in SMALL.items() if name not in ("model.num_kv_heads",)} | {
    "training.steps": "8", "validation.interval": "8", "model.sliding_window": "10",
}  # fmt: skip


def validations(folder: Path) -> list[dict[str, Any]]:
    return [line for line in records(folder) if "validation_loss" in line]


@pytest.mark.every
def test_the_debug_recipe_learns_to_predict_masked_tokens(tmp_path: Path) -> None:
    done = run(tmp_path, DEBUG, **{"run.name": "run", "metrics.trackers": "[]", "training.steps": "60"})
    assert done.returncode == 0, done.stderr
    values = validations(tmp_path / "runs/run")
    assert values[-1]["validation_loss"] < values[0]["validation_loss"] - 0.3
    assert values[-1]["validation_accuracy"] > 0.33
    assert "titanlike generate" not in done.stdout and "15% of the tokens masked" in done.stdout


@pytest.mark.slow
def test_a_run_is_read_by_transformers(tmp_path: Path) -> None:
    whole = run(
        tmp_path, DEBUG, variables={"TITANLIKE_BATCH_RECORD": str(tmp_path)},
        **TINY | {"run.name": "whole", "checkpoint.export": "float32"},
    )  # fmt: skip
    assert whole.returncode == 0, whole.stderr
    # The same held-out tokens, masked in the same way.
    recipe = load(MlmRecipe, tmp_path / "runs/whole/recipe.toml")
    training = recipe.training
    sources = openers.of(recipe)(
        recipe.data, build_tokenizer(recipe.tokenizer), seq_len=training.seq_len, global_batch_size=training.global_batch_size,
        seed=recipe.run.seed, validate=True,
    )  # fmt: skip
    held_out = BatchLoader(
        sources.validation, global_batch_size=training.global_batch_size, local_batch_size=4, data_rank=0, num_data_ranks=1,
        seed=0, device=torch.device("cpu"),
    )  # fmt: skip
    # `titanlike data inspect` opens what the run has read.
    BatchLoader(
        sources.training, global_batch_size=training.global_batch_size, local_batch_size=4, data_rank=0, num_data_ranks=1,
        seed=0, device=torch.device("cpu"), record=tmp_path / "inspected",
    ).microbatches(1)  # fmt: skip
    read_by_run, inspected = (next(tmp_path.glob(f"{kind}.*")).read_text() for kind in ("training", "inspected"))
    assert read_by_run.splitlines()[0] == inspected.strip()
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "runs/whole/hf").eval()
    losses, correct, count = 0.0, 0, 0
    for microbatches in held_out.first_batches(recipe.validation.batches):
        for batch in microbatches:
            is_label = batch.labels != IGNORE
            with torch.no_grad():
                logits, labels = model(batch.inputs["tokens"]).logits[is_label], batch.labels[is_label]
            losses += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
            correct, count = correct + int((logits.argmax(-1) == labels).sum()), count + len(labels)
    last = validations(tmp_path / "runs/whole")[-1]
    assert losses / count == pytest.approx(last["validation_loss"], rel=1e-5)
    assert correct / count == pytest.approx(last["validation_accuracy"], abs=1e-9)
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
