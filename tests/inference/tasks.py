"""Files of every kind that an evaluation reads, and an evaluator."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from tests.interop.models import LLAMA
from titanlike.config.sections import Data, Evaluation, Sample, Training
from titanlike.config.sections import Tokenizer as TokenizerSection
from titanlike.data.tokens.tokenizer import build_tokenizer
from titanlike.inference.evaluator import Evaluator

CONFIG = dataclasses.replace(LLAMA, vocab_size=320, num_layers=4, max_seq_len=96)
ITEMS: dict[str, list[dict[str, Any]]] = {
    "hellaswag": [
        dict(activity_label="Cooking", ctx_a="A cook  waits [sic].", ctx_b="the pan",
             endings=["is hot [title] Serve", "flies", "sings a song"], label="2"),
        dict(activity_label="A", ctx_a="b", ctx_b="c", endings=["d", "e"], label=0),
    ],
    "arc": [dict(question="What is 1 + 1?", choices=dict(text=["two", "thrée", "a"], label=["A", "B", "C"]), answerKey="B")],
    "piqa": [dict(goal="Open a jar", sol1="turn the lid", sol2="break it", label=1)] * 5,
    "lambada": [dict(text="one two three"), dict(text="a very long text " * 20 + "end")],
}  # fmt: skip
TEXTS = ["first document", "zweites mit Ümläuten 漢字", "x" * 150, "the last one"]


def write_files(folder: Path) -> Evaluation:
    folder.mkdir(exist_ok=True)
    for format, items in ITEMS.items():
        (folder / f"{format}.jsonl").write_text("".join(f"{json.dumps(item)}\n" for item in items))
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    tasks = tuple(str(folder / f"{format}.jsonl") for format in ITEMS)
    return Evaluation(tasks=tasks, data=(str(folder / "text.jsonl"),))


def evaluator_of(section: Evaluation, *, batch_size: int = 3, data: Data | None = None) -> Evaluator:
    tokenizer = build_tokenizer(TokenizerSection())
    training = Training(seq_len=50, local_batch_size=batch_size)
    return Evaluator(section, Sample(), data or Data(), training, CONFIG, tokenizer, 0)
