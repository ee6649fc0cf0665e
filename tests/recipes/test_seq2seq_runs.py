"""Runs of `recipes/seq2seq.py`: the debug recipe learns, and its model has in transformers the loss of held-out
targets that the run recorded. Pairs of texts are learned and generated."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from tests.launching import ROOT, SMALL, python, recorded, run
from tests.recipes.held_out import opened
from titanlike.losses import IGNORE
from titanlike.recipe.seq2seq import Seq2SeqRecipe

DEBUG = str(ROOT / "train_configs/seq2seq_debug.toml")
TINY = {name: value for name, value in SMALL.items() if name not in ("model.num_kv_heads",)} | {
    "model.num_layers": "3", "model.num_encoder_layers": "1", "model.vocab_size": "320", "training.steps": "8",
    "validation.interval": "8",
}  # fmt: skip


@pytest.mark.every
def test_the_debug_recipe_learns_to_restore_spans(tmp_path: Path) -> None:
    done = run(tmp_path, DEBUG, **{"run.name": "run", "metrics.trackers": "[]", "training.steps": "40"})
    assert done.returncode == 0, done.stderr
    values = recorded(tmp_path / "runs/run", "validation_loss")
    assert values[-1] < values[0] - 0.08 and values[-1] < 2.7
    assert "titanlike generate" in done.stdout and "21 of 141 tokens in 7 spans" in done.stdout


@pytest.mark.slow
def test_a_run_is_read_by_transformers(tmp_path: Path) -> None:
    whole = run(
        tmp_path, DEBUG, variables={"TITANLIKE_BATCH_RECORD": str(tmp_path)},
        **TINY | {"run.name": "whole", "checkpoint.export": "float32"},
    )  # fmt: skip
    assert whole.returncode == 0, whole.stderr
    recipe, held_out = opened(Seq2SeqRecipe, tmp_path / "runs/whole", tmp_path)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "runs/whole/hf").eval()
    loss, count = 0.0, 0
    for batch in held_out:
        is_label = batch.labels != IGNORE
        with torch.no_grad():  # transformers shifts the labels by itself
            mean = model(batch.inputs["tokens"], labels=batch.labels).loss
        loss, count = loss + float(mean * is_label.sum()), count + int(is_label.sum())
    assert loss / count == pytest.approx(recorded(tmp_path / "runs/whole", "validation_loss")[-1], rel=1e-5)
    # The sentinels are rows of the embedding that the byte tokenizer does not have.
    prompt = "def <extra_id_0>(self): return <extra_id_1>"
    arguments = ["generate", "runs/whole", "--prompt", prompt, "--temperature=0", "--tokens=20", "--json"]
    generated = python(tmp_path, "-m", "titanlike.tools.cli.main", *arguments, variables={"NPROC": "1"})
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "runs/whole/hf")
    inputs = tokenizer(prompt, return_tensors="pt")
    assert {recipe.model.vocab_size - 1, recipe.model.vocab_size - 2} < set(inputs["input_ids"][0].tolist())
    found = model.generate(**inputs, do_sample=False, max_new_tokens=20, use_cache=False)[0, 1:]
    assert json.loads(generated.stdout)["text"] == tokenizer.decode(
        [t for t in found.tolist() if t != tokenizer.eos_token_id]
    )
    imported = python(tmp_path, "-m", "titanlike.tools.cli.main", "import", "runs/whole/hf", "again.toml")
    assert imported.returncode == 0, imported.stderr
    text = (tmp_path / "again.toml").read_text()
    assert 'program = "seq2seq"' in text and 'prompt_field = "source"' in text


@pytest.mark.every
def test_pairs_are_learned_and_generated(tmp_path: Path) -> None:
    words = {"uno": "one", "due": "two", "tre": "three", "quattro": "four", "cinque": "five"}
    pairs = [{"source": word, "target": other} for word, other in words.items()]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs * 100))
    options = {
        "run.name": "run", "metrics.trackers": "[]", "training.steps": "60", "data.source": "text", "data.path": "pairs.jsonl",
        "data.prompt_field": "source", "data.text_field": "target", "seq2seq.target_len": "32", "training.seq_len": "64",
        "seq2seq.source_prefix": "translate: ",
    }  # fmt: skip
    done = run(tmp_path, DEBUG, **options)
    assert done.returncode == 0, done.stderr
    assert "490 pairs of" in done.stdout
    prompts = ["--prompt", "translate: tre", "--prompt", "translate: due"]
    arguments = ["generate", "runs/run", *prompts, "--temperature", "0", "--tokens", "8"]
    generated = python(tmp_path, "-m", "titanlike.tools.cli.main", *arguments)
    assert generated.returncode == 0, generated.stderr
    assert [line for line in generated.stdout.splitlines() if line][1:3] == ["translate: tre", "three"]
    assert generated.stdout.split()[-1] == "two"
