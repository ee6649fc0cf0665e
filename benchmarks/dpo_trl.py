"""Five steps of DPO and IPO beside those of TRL's DPOTrainer, from the same weights and with the same pairs.

python -m benchmarks.dpo_trl --out benchmarks/results/dpo_trl_cpu.json

It requires `pip install trl`, which is no dependency of this repository. Each sequence has one pair, so that a batch has as many
pairs in both. Both train in float32. TRL pads, and this program packs.
"""

import argparse
import json
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import IterableDataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

from benchmarks.common import ROOT, script, titanlike, train
from titanlike.data.batches.preference_sequences import open_sources
from titanlike.data.tokens.tokenizer import build_tokenizer
from titanlike.recipe import load
from titanlike.recipe.dpo import DpoRecipe

STEPS, PAIRS, SEQ_LEN, LR, EPS = 5, 4, 111, 1e-3, 1e-4
LOSSES = {"dpo": "sigmoid", "ipo": "ipo"}
REWARDS = tuple(f"rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies"))
METRICS = ("loss", *REWARDS, "logps/chosen", "logps/rejected")

RECIPE = """\
program = "dpo"
extends = "{root}/train_configs/dpo_debug.toml"
[data]
source = "preference"
path = "{folder}/pairs.jsonl"
cache = "{folder}/cache"
holdout_every = 0
[tokenizer]
encoding = "{folder}/hf"
[training]
steps = {steps}
seq_len = {seq_len}
global_batch_size = {pairs}
local_batch_size = {pairs}
max_norm = 1e9
[optimizer]
lr = {lr}
eps = {eps}
weight_decay = 0.0
groups = []
[schedule]
warmup_steps = 0
decay = "none"
[validation]
interval = 0
[metrics]
interval = 1
[checkpoint]
initial = "{folder}/hf"
"""


def write_pairs(path: Path) -> list[dict[str, Any]]:
    """Writes pairs of which no two fit in one sequence."""
    records = []
    for n in range(40):
        prompt, chosen, rejected = f"Question {n:02}?", "yes " * (2 + n % 4), "no " * (3 + n % 5)
        text = {"prompt": prompt, "chosen": chosen.strip(), "rejected": rejected.strip()}
        records.append(text)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return records


def prepare(folder: Path) -> list[dict[str, Any]]:
    """Writes the pairs and a Hugging Face folder of a small model that has been trained for some steps."""
    train("finetune_debug", {"training.steps": 20, "run.name": "base", "validation.interval": 0}, folder=folder)
    titanlike("export", folder / "base", folder / "hf")
    values = dict(root=ROOT, folder=folder, steps=STEPS, seq_len=SEQ_LEN, pairs=PAIRS, lr=LR, eps=EPS)
    (folder / "recipe.toml").write_text(RECIPE.format(**values))
    return write_pairs(folder / "pairs.jsonl")


def of_titanlike(folder: Path, loss: str) -> list[dict[str, float]]:
    """Returns the metrics of each step of this repository's program."""
    records = train(str(folder / "recipe.toml"), {"preference.loss": loss, "run.name": loss}, folder=folder)
    return [{name: record[name] for name in METRICS} for record in records if "loss" in record]


class Trainer(DPOTrainer):  # type: ignore[misc]
    """TRL's trainer, which keeps the loss of each step in full precision."""

    losses: list[float]

    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        """Returns the loss of TRL."""
        loss = super().compute_loss(*arguments, **options)
        self.losses.append((loss[0] if isinstance(loss, tuple) else loss).item())
        return loss


def of_trl(folder: Path, loss: str, records: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Returns the metrics of each step of TRL's trainer, on the same pairs."""
    recipe = load(DpoRecipe, folder / "recipe.toml")
    tokenizer = build_tokenizer(recipe.tokenizer)
    source = open_sources(
        recipe.data, tokenizer, seq_len=SEQ_LEN, global_batch_size=PAIRS, seed=0, validate=False
    ).training
    numbers: list[int] = []
    for step in range(1, STEPS + 1):
        ids = source.read(step, range(PAIRS)).document_ids
        assert ids is not None and all(len({*row}) == 3 for row in ids.tolist()), "a sequence has one pair and padding"
        numbers += (ids[:, 0] // 2).tolist()
    messages = [
        {
            "prompt": [{"role": "user", "content": records[number]["prompt"]}],
            **{name: [{"role": "assistant", "content": records[number][name]}] for name in ("chosen", "rejected")},
        }
        for number in numbers
    ]
    arguments = DPOConfig(
        output_dir=str(folder / "trl"), loss_type=LOSSES[loss], beta=recipe.preference.beta, max_steps=STEPS, max_length=None,
        per_device_train_batch_size=PAIRS, learning_rate=LR, lr_scheduler_type="constant", warmup_steps=0, adam_beta1=0.9,
        adam_beta2=0.95, adam_epsilon=EPS, weight_decay=0.0, max_grad_norm=1e9, logging_steps=1, report_to=[], use_cpu=True,
        bf16=False, gradient_checkpointing=False, disable_tqdm=True, save_strategy="no", seed=0,
    )  # fmt: skip
    models = [AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32) for _ in range(2)]
    fast: Any = AutoTokenizer.from_pretrained(folder / "hf")
    fast.pad_token = fast.eos_token
    # Read in order.
    pairs = IterableDataset.from_generator(lambda: iter(messages))
    trainer = Trainer(*models, args=arguments, train_dataset=pairs, processing_class=fast)
    trainer.losses = []
    trainer.train()
    logs = [line for line in trainer.state.log_history if "loss" in line]
    return [
        {name: line[name] for name in METRICS} | {"loss": value}
        for line, value in zip(logs, trainer.losses, strict=True)
    ]


def measure(_: argparse.Namespace) -> dict[str, Any]:
    """Runs both."""
    report: dict[str, Any] = {"packages": {name: version(name) for name in ("trl", "transformers", "accelerate")}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        records = prepare(folder)
        for loss in LOSSES:
            steps = list(zip(of_titanlike(folder, loss), of_trl(folder, loss, records), strict=True))
            largest = {name: max(abs(ours[name] - theirs[name]) for ours, theirs in steps) for name in METRICS}
            # Equal rewards, as before the first step, count as half in ours and as wrong in TRL.
            accuracies = "rewards/accuracies"
            largest[accuracies] = max(abs(ours[accuracies] - theirs[accuracies]) for ours, theirs in steps[1:])
            report[loss] = {"largest_difference": largest, "steps": [{"titanlike": a, "trl": b} for a, b in steps]}
    return report


if __name__ == "__main__":
    script(
        __doc__,
        measure,
        lambda found: json.dumps({loss: found[loss]["largest_difference"] for loss in LOSSES}, indent=1),
    )
