"""`titanlike generate` and `titanlike evaluate`."""

import dataclasses
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.interop.models import LLAMA, export_model, model_of
from tests.launching import Cli
from tests.pool import Ranks
from tests.training import tiny, train
from titanlike.distributed import launch_config, process_group
from titanlike.models.moe.config import Qwen3MoeConfig
from titanlike.run.checks import check_machine
from titanlike.tools.programs import load_known

CONFIG = dataclasses.replace(LLAMA, vocab_size=320, max_seq_len=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    (path / "piqa.jsonl").write_text(json.dumps(dict(goal="a", sol1="b", sol2="cd", label=0)) + "\n")
    (path / "text.txt").write_text("some text to evaluate, naïve " * 5)
    (path / "prompts.txt").write_text("one\n\ntwo\n")
    export_model(model_of(CONFIG), CONFIG, path / "hf")
    return path


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in launch_config.JOB_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NPROC", "1")


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Returns a function that sets the standard input."""
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def refusal(cli: Cli, *words: object) -> str:
    """Returns the error message of a command, which may follow its usage."""
    printed = cli(*words, code=2)
    lines = printed.err.splitlines()
    assert not printed.out and (len(lines) == 1 or lines[0].startswith("usage:"))
    return lines[-1]


def test_prompts_from_arguments_a_file_and_standard_input(folder: Path, typed: Callable[[str], None], cli: Cli) -> None:
    options = ("--tokens", 12, "--seed", 5)
    prompts = ("--prompt", "zero", "--prompts", folder / "prompts.txt")
    printed = cli("generate", folder / "hf", *prompts, *options, "--json").out
    lines = [json.loads(line) for line in printed.splitlines()]
    assert [line["prompt"] for line in lines] == ["zero", "one", "two"]
    assert len({line["text"] for line in lines}) == 3
    typed("zero\n")
    assert cli("generate", folder / "hf", *options).out == f"zero{lines[0]['text']}\n"
    typed("zero\none\n")
    printed = cli("generate", folder / "hf", "--prompts", "-", *options, "--batch-size", 1).out
    assert printed.startswith(f"[1 of 2]\nzero{lines[0]['text']}\n\n[2 of 2]\none{lines[1]['text']}\n")


def test_one_of_several_processes_reads_standard_input(
    folder: Path, monkeypatch: pytest.MonkeyPatch, typed: Callable[[str], None], cli: Cli
) -> None:
    monkeypatch.setattr(process_group, "is_main", lambda: False)
    typed("zero\none\n")
    assert refusal(cli, "generate", folder / "hf", "--prompts", "-") == "error: - has no prompts; give one in each line"
    assert sys.stdin.read() == "zero\none\n"


def test_figures_as_text_and_as_json(folder: Path, cli: Cli) -> None:
    what = ("--task", folder / "piqa.jsonl", "--data", folder / "text.txt", "--seq-len", 32)
    text = cli("evaluate", folder / "hf", *what).out
    results = json.loads(cli("evaluate", folder / "hf", *what, "--json").out)["results"]
    assert results.keys() == {"piqa", "text"}
    assert results["text"]["bytes"] == (folder / "text.txt").stat().st_size
    assert f"text: loss {results['text']['loss']:.4f}  perplexity" in text
    assert f"piqa: acc {results['piqa']['acc']:.4f}  acc_norm" in text


def test_a_run_with_experts_and_its_export_have_the_same_results(ranks: Ranks, tmp_path: Path, cli: Cli) -> None:
    model = Qwen3MoeConfig(
        dim=32, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=16, num_experts=4, balance_loss=0.01
    )
    options: dict[str, Any] = dict(training=dict(steps=4), schedule=dict(warmup_steps=2), validation=dict(interval=0))
    train(ranks(1), tiny(tmp_path, "run", model=model, checkpoint=dict(export="float32"), **options))
    cli("export", tmp_path / "run", tmp_path / "hf")
    (tmp_path / "text.txt").write_text("some text to evaluate " * 5)
    outputs = []
    for source in ("run", "run/hf", "hf"):
        text = cli("generate", tmp_path / source, "--prompt", "def ", "--tokens", 12, "--seed", 5).out
        evaluated = cli("evaluate", tmp_path / source, "--data", tmp_path / "text.txt", "--seq-len", 32, "--json").out
        outputs.append((text, json.loads(evaluated)["results"]))
    assert len(outputs[0][0]) > len("def \n") and outputs[0][1]["text"]["loss"] > 0
    assert outputs[0] == outputs[1] == outputs[2]
    # The recipe of an import has the model of the folder. The coefficient of the auxiliary loss is the recipe's own.
    cli("import", tmp_path / "hf", tmp_path / "next.toml")
    options = {"model.balance_loss": "0.02", "run.dir": str(tmp_path), "data.source": "synthetic"}
    recipe = load_known(tmp_path / "next.toml", options)
    assert recipe.model == dataclasses.replace(model, balance_loss=0.02)
    check_machine(recipe)


def test_several_processes_on_one_machine(folder: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """Parity is tested in the pool; this is the start of the processes."""
    started: list[Any] = []
    monkeypatch.setattr("titanlike.distributed.torchrun.torchrun", lambda *arguments: started.append(arguments) or 0)
    monkeypatch.setenv("NPROC", "2")
    evaluated = str(folder / "text.txt")
    for arguments in (["generate", str(folder / "hf"), "--prompt", "a"], ["evaluate", "hf", "--data", evaluated]):
        cli(*arguments)
        config, words, _ = started.pop()
        assert config.world_size == 2
        assert words == ["-m", "titanlike.tools.cli.main", *arguments]


def test_mistakes_are_reported_in_a_sentence(folder: Path, cli: Cli) -> None:
    (folder / "empty").mkdir()
    task = folder / "piqa.jsonl"
    for arguments, message in (
        (("generate", folder / "empty", "--prompt", "a"), "contains no checkpoint and no config.json"),
        (("generate", folder / "hf", "--prompt", "a", "--stop", ""), "--stop: the text is empty"),
        (("generate", folder / "hf", "--prompt", "a", "--top-p", "2"), "expected a number from 1e-09 to 1, got '2'"),
        (("generate", folder / "hf", "--prompts", folder / "none"), "none cannot be read: No such file"),
        (("generate", folder / "hf", "--prompt", "a", "--step", "3"), "which has no steps; omit --step"),
        (("evaluate", folder / "hf"), "there is nothing to evaluate; give --data or --task"),
        (("evaluate", folder / "hf", "--task", folder / "text.txt"), "text.txt, line 1: not an item of a task"),
        (("evaluate", folder / "hf", "--data", "nowhere"), "--data: 'nowhere' does not exist"),
        (
            ("evaluate", folder / "hf", "--data", task, "--seq-len", 65),
            "--seq-len 65: use 2 to 64 tokens, the context of",
        ),
        (("evaluate", folder / "hf", "--data", task, "--tensor", 3), "--tensor = 3 does not divide the 1 processes"),
    ):
        assert message in refusal(cli, *arguments), arguments


def test_weights_that_are_not_finite_are_reported_in_a_sentence(folder: Path, tmp_path: Path, cli: Cli) -> None:
    model = model_of(CONFIG)
    with torch.no_grad():
        model.get_parameter("norm.weight")[3] = torch.nan
    hf = export_model(model, CONFIG, tmp_path / "hf")
    for arguments in (
        ("generate", hf, "--prompt", "a", "--temperature", 0, "--json"),
        ("generate", hf, "--prompt", "a", "--json"),
        ("evaluate", hf, "--task", folder / "piqa.jsonl", "--json"),
        ("evaluate", hf, "--data", folder / "text.txt"),
    ):
        found = refusal(cli, *arguments)
        assert found.startswith("error: the model computes NaN or infinity; restore its weights or, if they are"), (
            arguments
        )


def test_the_harness_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'titanlike[eval]'" in refusal(cli, "lm_eval", "--help")
