"""docs/quickstart.md: the plans are what it shows, and its lines run on a CPU with a small model and a local text."""

import json
import os
import shlex
import signal
from pathlib import Path

import pytest
import tomli

from tests.launching import ROOT, Cli, losses, python, run, start, wait_for
from tests.programs import blocks
from titanlike.tools import new_recipe

PAGE = ROOT / "docs/quickstart.md"
OUTPUTS = [block.removeprefix("\n") for block in PAGE.read_text().split("```")[1::2] if block.startswith("\n")]


def command(words: str) -> list[str]:
    """Returns the words of the only line of the page that begins so, without the program."""
    (line,) = {line for block in blocks(PAGE) for line in block.splitlines() if line.startswith(words)}
    return shlex.split(line)[1:]


@pytest.mark.parametrize("hardware", ["h100", "rtx_4090"])
def test_the_page_shows_the_plan(hardware: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(new_recipe, "hardware_here", lambda: None)
    for name in ("init", "plan"):
        printed = cli(*command(f"titanlike {name} tonight.toml --gpus 1 --hardware {hardware}")).out.splitlines()
    (shown,) = [block.splitlines() for block in OUTPUTS if set(block.splitlines()) <= set(printed)]
    assert {"batch", "peak,", "speed", "run"} <= {line.split()[0] for line in shown}
    if hardware == "h100":
        (shown_recipe,) = (tomli.loads(block) for block in blocks(PAGE, "toml") if "[optimizer]" in block)
        written = tomli.loads(Path("tonight.toml").read_text())
        assert all(values.items() <= written[section].items() for section, values in shown_recipe.items())


@pytest.mark.slow
def test_every_step_runs_with_a_small_model(tmp_path: Path) -> None:
    def titanlike(*words: str) -> str:
        done = python(tmp_path, "-m", "titanlike.tools.cli.main", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    (tmp_path / "text.jsonl").write_text(
        "".join(json.dumps({"text": f"{n}: The moon is round. " * 40}) + "\n" for n in range(3000))
    )
    prepare = command('titanlike data prepare "hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT/00[')
    prepare[2] = "text.jsonl"
    titanlike(*(word.replace("gpt2", "bytes") for word in prepare))
    assert json.loads((tmp_path / "data/train/manifest.json").read_text())["splits"].keys() == {"train", "validation"}
    titanlike("init", "tonight.toml", "--gpus=0", "--data=data/train")

    shorter = {
        "training.steps": "40",
        "schedule.warmup_steps": "2",
        "training.global_batch_size": "8",
        "sample.tokens": "0",
    }
    shorter |= {"validation.interval": "20", "metrics.interval": "1", "optimizer.groups": "[]"}
    _, *words = command("titanlike train tonight.toml --run.name=tonight")
    running = start(tmp_path, None, *words, **shorter)
    wait_for(tmp_path / "runs/tonight/metrics.jsonl")
    os.killpg(running.pid, signal.SIGINT)
    running.communicate(timeout=120)
    assert running.returncode in (130, -signal.SIGINT)
    _, recipe = command("titanlike train runs/tonight/recipe.toml")
    resumed = run(tmp_path, recipe)
    assert resumed.returncode == 0, resumed.stderr
    assert list(losses(tmp_path / "runs/tonight"))[-1] == 40

    assert titanlike(*command("titanlike generate runs/tonight"), "--tokens=3").startswith("The moon is")
    turns = [{"role": "user", "content": "Is the moon round?"}, {"role": "assistant", "content": "Yes."}]
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 100)
    _, *words = command("titanlike train tonight.toml --program=finetune")
    tuned = run(tmp_path, *words, **shorter | {"training.steps": "4", "data.holdout_every": "20"})
    assert tuned.returncode == 0, tuned.stderr
    answers = titanlike(*command("titanlike generate runs/chat"), "--tokens=3", "--json")
    assert answers == ""  # nothing was asked
