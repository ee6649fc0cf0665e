"""`titanlike init`: a valid, commented recipe for each machine, which trains."""

import errno
import shlex
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.launching import Cli, losses, run
from titanlike.config.sections import Tokenizer
from titanlike.recipe import PretrainRecipe, load
from titanlike.run.checks import check_recipe
from titanlike.tools import new_recipe
from titanlike.tools.data.prepare import prepare
from titanlike.tools.planning.hardware import load_hardware
from titanlike.tools.planning.job import Job
from titanlike.tools.planning.plan import make_plan


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(new_recipe, "hardware_here", lambda: None)
    return tmp_path


def init(cli: Cli, *arguments: str) -> tuple[PretrainRecipe, list[str]]:
    """Returns the recipe, and the lines that are printed."""
    lines = cli("init", *arguments).out.splitlines()
    file = next((word for word in arguments if word.endswith(".toml")), "train.toml")
    return load(PretrainRecipe, Path(file)), lines


@pytest.mark.parametrize(
    ("gpus", "options", "size"),
    [
        (0, [], "debug"),
        (1, [], "3.2-1B"),
        (6, ["--model=124M"], "124M"),
        (8, [], "3.2-3B"),
        (8, ["--hardware=a100", "--model=3-8B"], "3-8B"),
        (64, [], "3-8B"),
    ],
)
def test_the_recipe_is_valid_and_fits(gpus: int, options: list[str], size: str, cli: Cli) -> None:
    recipe, printed = init(cli, "new.toml", f"--gpus={gpus}", *options)
    assert recipe.model.size == size
    check_recipe(recipe, max(gpus, 1))
    hardware = load_hardware("a100" if "--hardware=a100" in options else "h100")
    if gpus:
        plan = make_plan(Job(recipe, gpus), hardware)
        assert plan.fits
        assert recipe.checkpoint.interval * plan.time.seconds < 1.5 * new_recipe.SAVE_SECONDS
        tokens = recipe.training.steps * recipe.training.tokens_per_step
        assert tokens / recipe.model.num_parameters() == pytest.approx(20, rel=1e-3)  # with the tokenizer's vocabulary
        assert "--model=124M" in options or tokens / plan.tokens_per_second < 7.5 * 86_400 or "--model=3-8B" in options
    # Every key has a comment above it.
    lines = Path("new.toml").read_text().splitlines()
    keys = [number for number, line in enumerate(lines) if " = " in line and line[0] not in "# "]
    assert len(keys) > 15 and all(lines[number - 1].startswith("# ") for number in keys)
    assert max(map(len, lines)) <= 120
    assert lines[0].endswith(". `titanlike train --help all` describes all keys.")
    following = [line.removeprefix("next").strip() for line in printed[1:]]
    assert following[-1] == "titanlike train new.toml"
    prepares = "titanlike data prepare TEXT --out data/train --tokenizer gpt2"
    assert following[0] == (prepares if gpus else "titanlike train new.toml --check 1")


@pytest.mark.slow
def test_the_recipe_of_a_cpu_trains_on_text(folder: Path, cli: Cli) -> None:
    (folder / "corpus").mkdir()
    (folder / "corpus/a.txt").write_text("A text that is repeated. " * 8000)
    recipe, printed = init(cli, "--gpus=0", "--data=corpus")
    assert (
        recipe.data.source == "text" and recipe.training.steps < new_recipe.MAX_CPU_STEPS
    )  # few passes over little text
    assert printed[-1].strip() == "titanlike train train.toml"
    short = {
        "training.steps": "2", "schedule.warmup_steps": "1", "training.global_batch_size": "8", "metrics.interval": "1",
    }  # fmt: skip
    done = run(folder, "train.toml", **short, **{"run.name": "first", "sample.tokens": "0"})
    assert done.returncode == 0, done.stderr
    assert list(losses(folder / "runs/first")) == [1, 2]


def test_token_shards_keep_their_tokenizer(folder: Path, cli: Cli) -> None:
    (folder / "text.txt").write_text("A text. " * 1000)
    prepare(["text.txt"], folder / "shards", Tokenizer(encoding="bytes", eos="<|endoftext|>"), workers=0)
    recipe, _ = init(cli, "--gpus=1", "--data=shards", "--model=124M")
    assert (recipe.data.source, recipe.data.path) == ("shards", "shards")
    assert recipe.tokenizer == Tokenizer(encoding="bytes", eos="<|endoftext|>")
    assert recipe.model.vocab_size == 384  # instead of 50257


def test_a_larger_corpus_and_more_gpus_choose_a_larger_model() -> None:
    h100 = load_hardware("h100")

    def size(gpus: int, tokens: float) -> str:
        return new_recipe.choose_model(gpus, h100, new_recipe.Source("x", tokens, {})).size

    assert [size(8, tokens) for tokens in (1e6, 1e9, 1e10, 1e12)] == ["debug", "124M", "3.2-1B", "3.2-3B"]
    assert [size(gpus, 1e12) for gpus in (0, 1, 64, 4096)] == ["debug", "3.2-1B", "3-8B", "3-70B"]


def test_slow_steps_are_saved_every_half_hour(cli: Cli) -> None:
    slow, _ = init(cli, "slow.toml", "--gpus=1", "--hardware=h100", "--model=3.2-1B")  # 19 s
    slower, _ = init(cli, "slower.toml", "--gpus=1", "--hardware=rtx_4090", "--model=3.2-1B")  # 108 s
    assert (slow.checkpoint.interval, slower.checkpoint.interval) == (100, 20)
    assert slow.validation.interval == 500
    fast, _ = init(cli, "fast.toml", "--gpus=8", "--hardware=h100", "--model=124M")
    assert fast.checkpoint.interval == fast.validation.interval  # a tenth of the steps, at most 500


def test_mistakes(folder: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    (folder / "mine.toml").write_text("mine")
    assert "mine.toml exists; choose another name" in cli("init", "mine.toml", code=2).err
    assert (folder / "mine.toml").read_text() == "mine"
    assert "did you mean 124M?" in cli("init", "--model=125M", code=2).err
    assert "--data gone: not found" in cli("init", "--data=gone", code=2).err
    with monkeypatch.context() as patch:
        denied = PermissionError(errno.EACCES, "Permission denied", "/proc/1/cwd")
        patch.setattr(Path, "rglob", Mock(side_effect=denied))
        message = "--data .: /proc/1/cwd cannot be read: Permission denied; give a folder of text"
        assert message in cli("init", "--data=.", code=2).err
    assert "fits on 1 x H100" in cli("init", "--model=3-8B", "--gpus=1", code=2).err
    assert [path.name for path in folder.iterdir()] == ["mine.toml"]


def test_a_path_is_quoted(folder: Path, cli: Cli) -> None:
    (folder / "my text").mkdir()
    (folder / "my text/a.txt").write_text("A text.")
    _, printed = init(cli, "a b.toml", "--gpus=1", "--data=my text", "--model=124M")
    first, second = (shlex.split(line) for line in printed[1:])
    assert first[1:5] == ["titanlike", "data", "prepare", "my text"] and second == ["titanlike", "train", "a b.toml"]
