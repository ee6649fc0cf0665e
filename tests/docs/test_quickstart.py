"""docs/quickstart.md: the plans are what it shows, and its lines run on a CPU with a small model and a local text."""

import json
import math
import os
import re
import shlex
import signal
from pathlib import Path

import pytest
import tomli

from tests.launching import ROOT, Cli, losses, python, run, start, wait_for
from tests.programs import blocks
from titanlike.recipe import PretrainRecipe, load
from titanlike.tools import new_recipe
from titanlike.tools.planning.hardware import load_hardware

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
    text = " ".join(PAGE.read_text().split())
    if hardware == "h100":
        speed = float(re.findall(r"speed +([\d,]+)", "\n".join(shown))[0].replace(",", ""))
        assert round(600 * speed / (128 * 8192), -1) == 30  # "about 30 steps" in ten minutes
        assert "taken about 30 steps of a million tokens" in text
        (hours,) = re.findall(r"run .* ([\d.]+) hours", cli("plan", "tonight.toml", "--gpus", "1").out)
        assert round(float(hours) / 12) == 9 and "four and a half days" in text
        price = load_hardware("h100").dollars_per_gpu_hour
        assert f"${price} per GPU-hour" in text
        (shown_recipe,) = (tomli.loads(block) for block in blocks(PAGE, "toml") if "[optimizer]" in block)
        written = tomli.loads(Path("tonight.toml").read_text())
        assert all(values.items() <= written[section].items() for section, values in shown_recipe.items())
        parameters = load(PretrainRecipe, Path("tonight.toml")).model.num_parameters() / 1e9
        checkpoint = 12 * parameters  # weights and two moments
        for number, size in ((1, "13 GB each"), (3, "39 GB for checkpoints"), (2, "26 GB for those of the chat run")):
            assert f"{number * checkpoint:.0f} GB" == " ".join(size.split()[:2]) and size in text
        assert f"{4 * parameters:.1f} GB for the export" in text
        Path("chat.toml").write_text(Path("tonight.toml").read_text().replace('"pretrain"', '"finetune"'))
        options = command("titanlike train tonight.toml --program=finetune")[2:]
        options = [word for word in options if not word.startswith(("--program", "--checkpoint.initial", "--run.name"))]
        planned = " ".join(cli("plan", "chat.toml", "--gpus", "1", *options).out.split())
        assert "200 steps, 2.62e+07 tokens: 10.0 minutes" in planned
        assert "read 26 million tokens in 10 minutes on an H100" in text
    else:
        (hours,) = re.findall(r"run .* ([\d.]+) hours", shown[-1])
        assert round(10 * 60 * float(hours) / 1500, 1) == 4.5 and "every four and a half minutes" in text


def test_the_vocabularies_have_these_parameters_and_losses() -> None:
    text = " ".join(PAGE.read_text().split())
    for vocab_size, parameters, loss in ((50304, "1.08", "near 10.8"), (128256, "1.24", "tokenizer 11.8")):
        model = new_recipe.find_model("3.2-1B", vocab_size=vocab_size)
        assert f"{model.num_parameters() / 1e9:.2f}" == parameters and f"has {parameters} billion" in text
        assert f"{math.log(vocab_size):.1f}" == loss.split()[1] and loss in text
    speed = json.loads((ROOT / "benchmarks/results/data_prepare_cpu.json").read_text())["speed"]["Llama 3.1"]
    assert round(speed["tokens_per_second"]["titanlike"] / 1e6) == 2 and "about two million tokens" in text


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
