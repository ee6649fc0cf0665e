"""Runs of the programs other than `pretrain` and `finetune`: debug recipes learn, transformers reads masked language models and
encoder-decoders with the validation loss that the run recorded, and a teacher is a run or a Hugging Face folder."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoModelForSeq2SeqLM, AutoTokenizer

from tests.launching import ROOT, SMALL, losses, python, recorded, records, run
from tests.programs import verify
from titanlike.data.batches import openers
from titanlike.data.batches.loader import Batch, BatchLoader
from titanlike.data.tokens.tokenizer import build_tokenizer
from titanlike.losses import IGNORE
from titanlike.recipe import load
from titanlike.recipe.mlm import MlmRecipe
from titanlike.recipe.seq2seq import Seq2SeqRecipe

MLM, SEQ2SEQ, DPO, DISTILL = (
    str(ROOT / f"train_configs/{program}_debug.toml") for program in ("mlm", "seq2seq", "dpo", "distill")
)
TINY = {name: value for name, value in SMALL.items() if name != "model.num_kv_heads"} | {
    "run.name": "run", "checkpoint.export": "float32", "training.steps": "8", "validation.interval": "8",
}  # fmt: skip
ENCODER_DECODER = {"model.num_layers": "3", "model.num_encoder_layers": "1", "model.vocab_size": "320"}


def train(folder: Path, recipe: str, **options: str) -> str:
    """Returns what a run prints."""
    done = run(folder, recipe, variables={"TITANLIKE_BATCH_RECORD": str(folder)}, **{"run.name": "run"} | options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def titanlike(folder: Path, *words: str, code: int = 0) -> Any:
    done = python(folder, "-m", "titanlike.tools.cli.main", *words, variables={"NPROC": "1"})
    assert done.returncode == code, done.stderr
    return done


def held_out(recipe_type: Any, folder: Path) -> Iterator[Batch]:
    """Yields the batches that a run has validated with. As `titanlike data inspect`, it opens the first one of training again."""
    recipe = load(recipe_type, folder / "runs/run/recipe.toml")
    training = recipe.training
    sources = openers.of(recipe)(
        recipe.data, build_tokenizer(recipe.tokenizer), seq_len=training.seq_len, global_batch_size=training.global_batch_size,
        seed=recipe.run.seed, validate=True,
    )  # fmt: skip
    sizes: dict[str, Any] = dict(
        global_batch_size=training.global_batch_size, local_batch_size=4, seed=0, data_rank=0, num_data_ranks=1,
        device=torch.device("cpu"),
    )  # fmt: skip
    BatchLoader(sources.training, **sizes, record=folder / "inspected").microbatches(1)
    read_by_run, inspected = (next(folder.glob(f"{kind}.*")).read_text() for kind in ("training", "inspected"))
    assert read_by_run.splitlines()[0] == inspected.strip()
    for microbatches in BatchLoader(sources.validation, **sizes).first_batches(recipe.validation.batches):
        yield from microbatches


@pytest.mark.every
@pytest.mark.parametrize(
    ("recipe", "steps", "improvement", "printed"),
    [(MLM, "60", 0.3, "15% of the tokens masked"), (SEQ2SEQ, "40", 0.08, "21 of 141 tokens in 7 spans")],
)
def test_a_debug_recipe_learns(recipe: str, steps: str, improvement: float, printed: str, tmp_path: Path) -> None:
    output = train(tmp_path, recipe, **{"metrics.trackers": "[]", "training.steps": steps})
    values = recorded(tmp_path / "runs/run", "validation_loss")
    assert values[-1] < values[0] - improvement
    assert printed in output and ("titanlike generate" in output) == (recipe == SEQ2SEQ)


@pytest.mark.every
@pytest.mark.minutes
def test_the_debug_recipe_learns_to_prefer_the_right_sums(tmp_path: Path) -> None:
    output = train(tmp_path, DPO, **{"metrics.interval": "1", "metrics.trackers": "[]"})
    first = next(line for line in records(tmp_path / "runs/run") if "rewards/accuracies" in line)
    assert first["rewards/accuracies"] == 0.5 and first["rewards/margins"] == first["kl"] == 0.0
    accuracies = recorded(tmp_path / "runs/run", "validation_accuracy")
    assert accuracies[0] < 0.75 and accuracies[-1] > 0.9
    assert "titanlike generate runs/run --chat" in output


@pytest.mark.slow
def test_transformers_has_the_loss_of_an_encoder(tmp_path: Path) -> None:
    train(tmp_path, MLM, **TINY | {"model.sliding_window": "10"})
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "runs/run/hf").eval()
    loss, correct, count = 0.0, 0, 0
    for batch in held_out(MlmRecipe, tmp_path):
        is_label = batch.labels != IGNORE
        with torch.no_grad():
            logits, labels = model(batch.inputs["tokens"]).logits[is_label], batch.labels[is_label]
        loss += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
        correct, count = correct + int((logits.argmax(-1) == labels).sum()), count + len(labels)
    last = [recorded(tmp_path / "runs/run", f"validation_{name}")[-1] for name in ("loss", "accuracy")]
    assert last == [pytest.approx(loss / count, rel=1e-5), pytest.approx(correct / count, abs=1e-9)]
    for command in (["generate", "runs/run", "--prompt", "def "], ["evaluate", "runs/run", "--data", MLM]):
        refused = titanlike(tmp_path, *command, code=2)
        assert "model.name = 'modernbert' is an encoder: it predicts masked tokens, and neither" in refused.stderr
    titanlike(tmp_path, "import", "runs/run/hf", "again.toml")
    small = {
        "data.path": MLM, "training.seq_len": "16", "training.global_batch_size": "2", "training.local_batch_size": "2",
        "training.steps": "2", "training.compute_dtype": "float32", "compile.mode": "none", "validation.interval": "0",
        "schedule.warmup_steps": "0", "metrics.trackers": "[]", "run.name": "again",
    }  # fmt: skip
    train(tmp_path, "again.toml", **small)


@pytest.mark.slow
def test_transformers_has_the_loss_and_the_text_of_an_encoder_decoder(tmp_path: Path) -> None:
    train(tmp_path, SEQ2SEQ, **TINY | ENCODER_DECODER)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "runs/run/hf").eval()
    loss, count = 0.0, 0
    for batch in held_out(Seq2SeqRecipe, tmp_path):
        is_label = batch.labels != IGNORE
        with torch.no_grad():  # transformers shifts the labels by itself
            mean = model(batch.inputs["tokens"], labels=batch.labels).loss
        loss, count = loss + float(mean * is_label.sum()), count + int(is_label.sum())
    assert loss / count == pytest.approx(recorded(tmp_path / "runs/run", "validation_loss")[-1], rel=1e-5)
    # The sentinels are rows of the embedding that the byte tokenizer does not have.
    prompt = "def <extra_id_0>(self): return <extra_id_1>"
    words = ["generate", "runs/run", "--prompt", prompt, "--temperature=0", "--tokens=20", "--json"]
    generated = titanlike(tmp_path, *words).stdout
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "runs/run/hf")
    inputs = tokenizer(prompt, return_tensors="pt")
    assert {318, 319} < set(inputs["input_ids"][0].tolist())
    found = model.generate(**inputs, do_sample=False, max_new_tokens=20, use_cache=False)[0, 1:]
    assert json.loads(generated)["text"] == tokenizer.decode([t for t in found.tolist() if t != tokenizer.eos_token_id])
    titanlike(tmp_path, "import", "runs/run/hf", "again.toml")
    text = (tmp_path / "again.toml").read_text()
    assert 'program = "seq2seq"' in text and 'prompt_field = "source"' in text


@pytest.mark.slow
def test_a_teacher_is_a_run_or_the_same_run_as_a_hugging_face_folder(tmp_path: Path) -> None:
    missing = run(tmp_path, DISTILL)
    assert missing.returncode == 2
    assert "distillation.teacher = 'runs/teacher' is not a folder; give a run, a checkpoint or" in missing.stderr
    assert run(tmp_path, **SMALL | {"run.name": "teacher"}).returncode == 0
    titanlike(tmp_path, "export", "runs/teacher", "hf_teacher")
    teacher = {key.replace("model.", "teacher."): value for key, value in SMALL.items() if key.startswith("model.")}
    tiny = SMALL | teacher | {"model.dim": "32", "model.num_layers": "1", "training.steps": "4"}
    for name, weights in (("one", "hf_teacher"), ("other", "runs/teacher")):
        output = train(tmp_path, DISTILL, **tiny | {"run.name": name, "distillation.teacher": weights})
        line = rf"\nteacher llama of 2 layers, model\.dim 64: {weights}\nloss +0\.8 x KL\(teacher \|\| model\)"
        assert re.search(line, output)
    assert losses(tmp_path / "runs/one") == losses(tmp_path / "runs/other")
    titanlike(tmp_path, "export", "runs/one", "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"]) == (32, 1)


@pytest.mark.slow
def test_a_layout_of_the_shipped_recipe_is_verified(tmp_path: Path) -> None:
    recipe = str(ROOT / "train_configs/distill_llama3_1b.toml")
    done = verify(tmp_path, recipe, "--layout", "tensor=2,shard=2", "--steps", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("\nequal within tolerance\n")
    assert re.search(r"teacher\.dim +4096 -> 64\n", done.stdout)
