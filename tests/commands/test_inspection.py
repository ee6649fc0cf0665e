"""`titanlike data inspect`: the text that a rank reads, and the contents of token shards."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.launching import Cli
from titanlike.config.sections import Tokenizer
from titanlike.data.documents.readers import Fields
from titanlike.recipe import PretrainRecipe, load
from titanlike.recipe.finetune import FinetuneRecipe
from titanlike.recipe.mlm import MlmRecipe
from titanlike.recipe.seq2seq import Seq2SeqRecipe
from titanlike.tools.data.inspection import inspect_recipe
from titanlike.tools.data.prepare import prepare

DEBUG, SEQ2SEQ, MLM, FINETUNE = (
    Path(__file__).parents[2] / f"train_configs/{name}.toml"
    for name in ("debug", "seq2seq_debug", "mlm_debug", "finetune_debug")
)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    lines = [json.dumps({"text": f"yes {number}. ", "prompt": f"is it {number}?"}) for number in range(40)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    fields = Fields("text", "prompt")
    source, out = [str(tmp_path / "pairs.jsonl")], tmp_path / "tokens"
    prepare(source, out, Tokenizer(), fields=fields, validation_share=0.2, workers=0)
    return tmp_path / "tokens"


def test_documents_separators_and_prompts_have_distinct_styles(tokens: Path) -> None:
    keys = {
        "data.source": "shards", "data.path": str(tokens), "training.seq_len": "64", "training.global_batch_size": "4",
    }  # fmt: skip
    recipe = load(PretrainRecipe, DEBUG, keys)
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", soft_wrap=True, highlight=False)
    inspect_recipe(recipe, step=1, rank=1, ranks=2, limit=1, validation=False, console=console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "step    1, data-parallel rank 1 of 2: 2 sequences of 64 tokens" in shown
    assert "\x1b[1msequence 2  \x1b[0m" in shown
    assert "1 more; --sequences 2 shows all" in shown
    assert "\x1b[1;30;43m<eos>\x1b[0m" in shown
    assert "\x1b[2" in shown  # prompts
    assert "\x1b[36m" in shown or "\x1b[2;36m" in shown  # every second document
    plain = io.StringIO()
    inspect_recipe(
        recipe, step=1, rank=1, ranks=2, limit=1, validation=False, console=Console(file=plain, soft_wrap=True)
    )
    assert "\x1b" not in plain.getvalue()
    assert ". <eos>is it " in plain.getvalue()


def shown(recipe: PretrainRecipe, **options: Any) -> str:
    """Returns what is printed of the first sequence of step 1."""
    console = Console(file=io.StringIO(), soft_wrap=True, width=10_000)
    inspect_recipe(recipe, step=1, rank=0, ranks=1, limit=1, validation=False, console=console, **options)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_corrupted_spans_and_what_they_replace_are_the_text(tmp_path: Path) -> None:
    """Each sentinel of the input, replaced by what follows it in the labels, gives the sequence of the text."""
    text = "".join(f"{number}, " for number in range(5000))
    (tmp_path / "numbers.txt").write_text(text)
    keys = {"data.source": "text", "data.path": str(tmp_path / "numbers.txt"), "data.cache": str(tmp_path)}
    _, inputs, labels = re.split(r"sequence 0 .*\n|\nlabels\n", shown(load(Seq2SeqRecipe, SEQ2SEQ, keys)))
    spans = re.split(r"(<extra_id_\d+>)", labels.split("<eos>")[0])
    assert len(spans) > 10 and inputs.endswith("<eos>")
    for name, span in zip(spans[1::2], spans[2::2], strict=True):
        assert inputs.count(name) == 1
        inputs = inputs.replace(name, span)
    assert inputs.removesuffix("<eos>") in text


def test_pairs_of_texts_are_shown_as_inputs_and_labels(tmp_path: Path) -> None:
    records = [{"prompt": f"{number}?", "text": f"{number}!"} for number in range(100, 110)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    keys = {
        "data.source": "text", "data.path": str(tmp_path / "pairs.jsonl"), "data.cache": str(tmp_path),
        "data.prompt_field": "prompt", "data.holdout_every": "0", "validation.interval": "0", "training.seq_len": "64",
    }  # fmt: skip
    _, inputs, labels = re.split(r"sequence 0 .*\n|\nlabels\n", shown(load(Seq2SeqRecipe, SEQ2SEQ, keys)))
    assert inputs == "".join(f"{number}?<eos>" for number in range(100, 110))
    assert labels.split("\n")[0] == "".join(f"{number}!<eos>" for number in range(100, 110))


def test_padding_is_neither_shown_nor_counted(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 2)
    keys = {
        "data.source": "chat", "data.path": str(tmp_path / "chats.jsonl"), "data.cache": str(tmp_path), "data.holdout_every": "0",
        "validation.interval": "0",
    }  # fmt: skip
    _, text = shown(load(FinetuneRecipe, FINETUNE, keys)).split("sequence 0  ")
    assert text.startswith("2 documents\n" + "user\na<eos>assistant\nb<eos>" * 2 + "\n")


def test_masked_tokens_and_their_labels(tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("a" * 5000)
    keys = {"data.source": "text", "data.path": str(tmp_path / "letters.txt"), "data.cache": str(tmp_path)}
    _, inputs, labels = re.split(r"sequence 0 .*\n|\nlabels\n", shown(load(MlmRecipe, MLM, keys)))
    runs, num_masks = labels.split("\n")[0].split(), inputs.count("<mask>")
    assert "…" in runs and set("".join(runs)) == {"…", "a"}  # all labels are the text's
    assert 1 < num_masks < "".join(runs).count("a") < 40 and len(inputs) == 128 + num_masks * (len("<mask>") - 1)


def test_a_folder_of_shards_is_summarized_and_verified(tokens: Path, cli: Cli) -> None:
    shown = cli("data", "inspect", tokens, "--verify").out
    assert "uint16, tokenizer bytes" in shown
    assert "train: " in shown and "validation: " in shown
    assert "prompt tokens (excluded from the loss)" in shown
    assert "all files match the manifest" in shown
    [shard] = tokens.glob("validation-*.tokens")
    content = bytearray(shard.read_bytes())
    content[5] ^= 1
    shard.write_bytes(content)
    cli("data", "inspect", tokens)  # its size is right
    for options in (["--verify"], ["--verify", "--json"]):
        refused = cli("data", "inspect", tokens, *options, code=2)
        assert f"{shard} does not match its hash in the manifest; copy it again" in refused.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "error: nothing: no such folder of token shards"),
        (["nothing", "--data.path=x"], "error: --data.path=x: token shards have no recipe keys to override"),
        ([str(DEBUG), "--step", "171"], "error: --step 171: the recipe has training.steps = 170; give one of them"),
        ([str(DEBUG), "--verify"], f"--verify requires a folder of token shards; {DEBUG} is a recipe"),
        (["nothing", "--validation"], "--validation requires a recipe; nothing is read as a folder of token shards"),
        (
            [str(DEBUG), "--data.source=stream", f"--data.path={DEBUG}", "--validation.interval=0", "--validation"],
            "--validation: a stream has no held-out sequences; set data.validation_path",
        ),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(arguments: list[str], message: str, cli: Cli) -> None:
    assert message in cli("data", "inspect", *arguments, code=2).err
