"""A folder whose tokenizer has an added token that the model has no row for, as Gemma 3 of 270M and 1B, in all commands."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.interop.models import CONFIGS, export_model, model_of
from tests.launching import python
from tests.pool import Pool
from tests.training import tiny, train
from titanlike.config.finetune import ChatData
from titanlike.config.sections import Tokenizer
from titanlike.data.tokens.chat_template import build_chat_template
from titanlike.data.tokens.tokenizer import build_tokenizer
from titanlike.interop.export import export
from titanlike.interop.weights import open_weights

pytestmark = pytest.mark.filterwarnings("default")  # those of transformers are not ours

IMAGE = "<image_soft_token>"
CONFIG: Any = dataclasses.replace(CONFIGS["Gemma 3"], vocab_size=257)  # type: ignore[type-var]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("added")
    export_model(model_of(CONFIG), CONFIG, path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(path / "hf")
    tokenizer.add_tokens([AddedToken(IMAGE, special=True)])
    assert tokenizer.convert_tokens_to_ids(IMAGE) == CONFIG.vocab_size
    tokenizer.save_pretrained(path / "hf")
    template = build_chat_template("", build_tokenizer(Tokenizer())).source
    extra = f"{{%- set extra = '{IMAGE}' if messages[0]['content'] == 'image' else '' -%}}\n"
    template = extra + template.replace("message['content'] + ", "message['content'] + extra + ")
    (path / "hf/chat_template.jinja").write_text(template)
    return path


def command(folder: Path, *words: str) -> tuple[str, str]:
    done = python(folder, "-m", "titanlike.tools.cli.main", *words, variables={"NPROC": "1"})
    return done.stdout, done.stderr


def test_it_generates_and_is_evaluated(folder: Path) -> None:
    prompt = f"the {IMAGE} and"  # plain text here, as everywhere
    out, errors = command(folder, "generate", "hf", "--prompt", prompt, "--tokens=20", "--temperature=0", "--json")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder / "hf"), AutoTokenizer.from_pretrained(folder / "hf")
    inputs = tokenizer(prompt, return_tensors="pt", split_special_tokens=True)
    expected = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert json.loads(out)["text"] == tokenizer.decode(expected, skip_special_tokens=True), errors
    (folder / "text.txt").write_text(f"Some text with {IMAGE} in it. " * 20)
    choices = {"text": ["a", "b"], "label": ["A", "B"]}
    item = {"question": IMAGE, "choices": choices, "answerKey": "A"}
    (folder / "task.jsonl").write_text(json.dumps(item) + "\n")
    out, errors = command(folder, "evaluate", "hf", "--data=text.txt", "--task=task.jsonl", "--seq-len=64", "--json")
    assert len(json.loads(out)["results"]) == 2, errors
    assert command(folder, "generate", "hf", "--chat", "--prompt=hi", "--tokens=4", "--temperature=0")[1] == ""
    _, errors = command(folder, "generate", "hf", "--chat", "--prompt=image", "--tokens=4", "--temperature=0")
    assert f"the text has {IMAGE}, token 257 of" in errors and "use the tokenizer of hf, whose weights" in errors


def test_it_is_fine_tuned_and_exported(folder: Path, ranks: Callable[[int], Pool], tmp_path: Path) -> None:
    question, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [question, answer]}) + "\n")
    train(ranks(1), tiny(
        tmp_path, "run", model=CONFIG, data=ChatData(source="chat", path=str(tmp_path / "chats.jsonl"), holdout_every=0),
        tokenizer=Tokenizer(encoding=str(folder / "hf")), checkpoint=dict(initial=str(folder / "hf")),
        training=dict(steps=1, global_batch_size=1, seq_len=64), schedule=dict(warmup_steps=0), validation=dict(interval=0),
    ))  # fmt: skip
    export(open_weights(tmp_path / "run"), tmp_path / "exported")
    assert AutoTokenizer.from_pretrained(tmp_path / "exported").convert_tokens_to_ids(IMAGE) == CONFIG.vocab_size
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "exported").config.vocab_size == CONFIG.vocab_size
