"""`titanlike data inspect`: the text that a rank reads, and what a folder of shards has."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from titanlike.cli.main import main
from titanlike.config import PretrainRecipe, UserError, load
from titanlike.config.sections import Tokenizer
from titanlike.data.inspection import inspect_recipe
from titanlike.data.prepare.prepare import prepare
from titanlike.data.text.documents import Fields

DEBUG = Path(__file__).parents[2] / "train_configs/debug.toml"


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    lines = [json.dumps({"text": f"yes {number}. ", "prompt": f"is it {number}?"}) for number in range(40)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    fields = Fields("text", "prompt")
    prepare(
        [str(tmp_path / "pairs.jsonl")],
        tmp_path / "tokens",
        Tokenizer(),
        fields=fields,
        validation_share=0.2,
        workers=0,
    )
    return tmp_path / "tokens"


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["titanlike", "data", "inspect", *words])
    try:
        main()
    except SystemExit as leaving:
        return int(leaving.code or 0)
    return 0


def test_documents_their_ends_and_what_is_given_are_told_apart(tokens: Path) -> None:
    keys = {
        "data.source": "shards",
        "data.path": str(tokens),
        "training.seq_len": "64",
        "training.global_batch_size": "4",
    }
    recipe = load(PretrainRecipe, DEBUG, keys)
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", soft_wrap=True, highlight=False)
    inspect_recipe(recipe, step=1, rank=1, ranks=2, most=1, validation=False, console=console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "step    1, data rank 1 of 2: 2 sequences of 64 tokens" in shown
    assert "\x1b[1msequence 2  \x1b[0m" in shown
    assert "1 more; --sequences 2 shows all" in shown
    assert "\x1b[1;30;43m<eos>\x1b[0m" in shown
    assert "\x1b[2" in shown  # what is given
    assert "\x1b[36m" in shown or "\x1b[2;36m" in shown  # every second document
    plain = io.StringIO()
    inspect_recipe(
        recipe, step=1, rank=1, ranks=2, most=1, validation=False, console=Console(file=plain, soft_wrap=True)
    )
    assert "\x1b" not in plain.getvalue()
    assert ". <eos>is it " in plain.getvalue()


def test_ranks_that_cannot_share_a_batch_are_refused(tokens: Path) -> None:
    recipe = load(PretrainRecipe, DEBUG, {})
    for rank, ranks in ((0, 3), (4, 4)):
        with pytest.raises(UserError, match=rf"--rank {rank} --ranks {ranks}: training\.global_batch_size = 16"):
            inspect_recipe(recipe, step=1, rank=rank, ranks=ranks, most=1, validation=False, console=Console())


def test_a_folder_of_shards_is_told_and_verified(
    tokens: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, str(tokens), "--verify") == 0
    shown = capsys.readouterr().out
    assert "uint16, tokenizer bytes" in shown
    assert "train: " in shown and "validation: " in shown
    assert "tokens given and not learnt" in shown
    assert "every file is what was written" in shown
    [shard] = tokens.glob("validation-*.tokens")
    content = bytearray(shard.read_bytes())
    content[5] ^= 1
    shard.write_bytes(content)
    assert run(monkeypatch, str(tokens)) == 0  # of the right size
    capsys.readouterr()
    assert run(monkeypatch, str(tokens), "--verify") == 2
    assert f"{shard} is not what was written; copy it again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "error: nothing: there is no such folder of token shards"),
        (["/"], "error: / has no manifest.json, so it is no folder of token shards; `titanlike data prepare` makes one"),
        (["nothing", "--data.path=x"], "error: --data.path=x: shards take no keys of a recipe"),
        ([str(DEBUG), "--step", "0"], "error: --step 0: give a whole number from 1 on"),
        ([str(DEBUG), "--data.pth=x"], "data.pth = \"x\": there is no such key; did you mean data.path?"),
        ([str(DEBUG), "verify"], "error: verify: a key of the recipe is changed with --section.key=value"),
    ],
)  # fmt: skip
def test_what_cannot_be_shown_is_told(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *words) == 2
    assert message in capsys.readouterr().err
