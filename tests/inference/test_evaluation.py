"""Evaluation: tasks against plain references, loss and bits per byte, layouts, training, and files that are refused."""

import dataclasses
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from tests.inference.tasks import CONFIG, ITEMS, TEXTS, evaluator_of, write_files
from tests.interop.models import MemoryWeights, model_of
from tests.pool import Ranks
from tests.training import mesh_of, tiny, train
from titanlike.checkpoint.loader import read_whole
from titanlike.config import UserError
from titanlike.config.sections import Data, Evaluation, Parallelism, Sample, Training
from titanlike.config.sections import Tokenizer as TokenizerSection
from titanlike.data.tokens.tokenizer import build_tokenizer
from titanlike.inference.evaluator import Evaluator
from titanlike.inference.sampling import Sampling
from titanlike.inference.scoring import Scorer, encode_pair
from titanlike.inference.tasks import FORMATS, Item, Task, read_task
from titanlike.models.registry import build_model
from titanlike.parallelisms.mesh import build_mesh
from titanlike.run.checks.machine import evaluation_files
from titanlike.tools.inference.load import load_for_evaluation

CPU = torch.device("cpu")


def test_items_are_those_of_the_harness(tmp_path: Path) -> None:
    """The harness itself is compared in tests/harness."""
    write_files(tmp_path)
    hellaswag = read_task(str(tmp_path / "hellaswag.jsonl"))
    assert hellaswag.items[0] == Item(
        "Cooking: A cook waits . The pan", (" is hot. Serve", " flies", " sings a song"), (13, 5, 12), 2
    )
    [arc] = read_task(str(tmp_path / "arc.jsonl")).items
    assert arc == Item("Question: What is 1 + 1?\nAnswer:", (" two", " thrée", " a"), (3, 5, 1), 1)
    assert (
        read_task(str(tmp_path / "piqa.jsonl"), limit=2).items
        == [Item("Question: Open a jar\nAnswer:", (" turn the lid", " break it"), (12, 8), 1)] * 2
    )
    assert read_task(str(tmp_path / "lambada.jsonl")).items[0] == Item("one two", (" three",))
    assert [read_task(str(tmp_path / f"{format}.jsonl")).format for format in FORMATS] == list(FORMATS)


def test_metrics_of_tasks() -> None:
    items = [Item("", ("", ""), (2, 10), 0), Item("", ("", ""), (4, 4), 1)]
    scores = [[(-2.0, False), (-5.0, False)], [(-3.0, True), (-2.0, False)]]
    # The second continuation of the first item is less likely, but not per character.
    assert Task("t", "piqa", items).scores(scores) == {"acc": 1.0, "acc_norm": 0.5}
    lambada = [[(-1.0, True)], [(-3.0, False)]]
    assert Task("t", "lambada", items).scores(lambada) == {"acc": 0.5, "perplexity": math.exp(2.0)}


def test_a_pair_is_encoded_as_one_text() -> None:
    tokenizer = build_tokenizer(TokenizerSection())
    assert encode_pair(tokenizer, "ab  ", "c") == (list(b"ab"), list(b"  c"))
    assert encode_pair(tokenizer, "", "c") == ([256], list(b"c"))


def test_scores_equal_log_softmax(alone: None) -> None:
    model, requests = (
        model_of(CONFIG),
        [([1, 2, 3], [4, 5]), ([7], [8]), (list(range(200)), [9, 10, 11]), ([1] * 40, [2] * 30)],
    )
    scorer = Scorer(model, build_mesh("cpu"), device=CPU, max_length=96, batch_size=3)
    with torch.no_grad():
        for (context, continuation), (value, is_greedy) in zip(requests, scorer(requests), strict=True):
            row = torch.tensor([(context + continuation)[-97:]])
            logits = model(row[:, :-1])[0, -len(continuation) :].log_softmax(-1)
            assert value == pytest.approx(logits.gather(1, row[0, -len(continuation) :, None]).sum().item(), rel=1e-5)
            assert not is_greedy
        best = model(torch.tensor([[1, 2, 3]]))[0, -1].argmax().item()
    [(_, is_greedy)] = scorer([([1, 2, 3], [int(best)])])
    assert is_greedy
    assert [scorer._padded_length(length) for length in (1, 32, 33, 65, 97)] == [32, 32, 64, 96, 97]


@pytest.mark.parametrize("is_answer", [False, True])
def test_a_sample_is_generated_as_the_section_says(
    is_answer: bool, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    generated = Mock(return_value=["c"])
    monkeypatch.setattr("titanlike.inference.evaluator.generate", generated)
    template: Any = SimpleNamespace(opening=lambda chat: [len(chat), 4], end_of_turn=lambda: 7) if is_answer else None
    sample, tokenizer = Sample(tokens=9, prompt="ab", temperature=0.7), build_tokenizer(TokenizerSection())
    evaluator = Evaluator(Evaluation(), sample, Data(), Training(seq_len=50), CONFIG, tokenizer, 3, template)
    text = evaluator.sample_text(model_of(CONFIG), build_mesh("cpu"))
    assert text == ("user: ab\nassistant: c" if is_answer else "abc")
    [_, prompts, _, sampling], options = generated.call_args
    assert (prompts, sampling) == ([[1, 4] if is_answer else [*b"ab"]], Sampling(0.7))
    assert options == dict(max_new_tokens=9, seed=3, stop_tokens=frozenset([7] if is_answer else []))


@pytest.mark.parametrize("masks", [False, True])
def test_loss_and_bits_per_byte_equal_a_plain_sum(masks: bool, tmp_path: Path, alone: None) -> None:
    section = dataclasses.replace(write_files(tmp_path), tasks=())
    model = model_of(CONFIG)
    found = evaluator_of(section, data=Data(document_masks=masks)).evaluate(model, build_mesh("cpu"))["text"]
    stream = [token for text in TEXTS for token in [*text.encode(), 256]]
    total, count = 0.0, 0
    for first in range(0, len(stream) - 1, 50):
        window = stream[first : first + 51]
        # With masks, each document of a sequence is a sequence of its own.
        ends = [i + 1 for i, token in enumerate(window) if token == 256 and masks] + [len(window)]
        for start, end in zip([0, *ends], ends, strict=False):
            row = torch.tensor([window[start:end]])
            if row.shape[1] > 1:
                logits = model(row[:, :-1])[0]
                total += torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="sum").item()
                count += row.shape[1] - 1
    size = sum(len(text.encode()) for text in TEXTS)
    assert found["tokens"] == count and found["bytes"] == size
    assert found["loss"] == pytest.approx(total / count, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)
    assert found["bits_per_byte"] == pytest.approx(total / math.log(2) / size, rel=1e-5)


def test_text_without_a_label_is_an_error(tmp_path: Path, alone: None) -> None:
    """As within a long prompt, if only a part of the text is read."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "?" * 400, "text": "an answer"}))
    section = Evaluation(data=(str(file),), limit=1)
    evaluator = evaluator_of(section, data=Data(prompt_field="prompt", cache=str(tmp_path / "cache")))
    with pytest.raises(UserError, match=r"^prompts has no label: all its tokens .*; increase the limit, or give other"):
        evaluator.evaluate(model_of(CONFIG), build_mesh("cpu"))


def test_progress_is_counted_in_batches(tmp_path: Path, alone: None) -> None:
    section, calls = write_files(tmp_path), list[tuple[str, int, int]]()
    evaluator = evaluator_of(section)
    results = evaluator.evaluate(model_of(CONFIG), build_mesh("cpu"), on_batch=lambda *call: calls.append(call))
    for name in results:
        (total,) = {total for one, _, total in calls if one == name}
        assert total > 0 and [number for one, number, _ in calls if one == name] == list(range(1, total + 1))


def test_limit_reads_the_first_items_and_sequences(tmp_path: Path, alone: None) -> None:
    section = dataclasses.replace(write_files(tmp_path), limit=1)
    evaluator = evaluator_of(section)
    assert all(len(task.items) == 1 for task in evaluator.tasks.values())
    found = evaluator.evaluate(model_of(CONFIG), build_mesh("cpu"))["text"]
    assert found["tokens"] == 50
    assert found["bytes"] == len("".join(TEXTS).encode()[:50]) - 1  # 51 tokens, of which two are separators


def _evaluated(section: Evaluation, layout: Parallelism) -> dict[str, dict[str, float]]:
    layout = layout.resolve(dist.get_world_size())
    mesh = mesh_of("cpu", **layout.dimensions())
    weights = MemoryWeights(model_of(CONFIG), CONFIG, TokenizerSection())
    model = load_for_evaluation(weights, mesh, layout, CPU, "float32")
    # Two data-parallel ranks have three and two sequences of text: they must still run the same number of batches.
    return evaluator_of(section, batch_size=2).evaluate(model, mesh)


LAYOUTS: dict[str, dict[str, Any]] = {
    "CP-FSDP": dict(context=2),
    "PP-TP": dict(pipeline=2, tensor=2),
    "TP-FSDP": dict(tensor=2),
    "FSDP": {},
    "HSDP": dict(replicate=2),
}


@pytest.mark.parametrize(
    "layout", [*list(LAYOUTS)[:2], *(pytest.param(name, marks=pytest.mark.slow) for name in list(LAYOUTS)[2:])]
)
def test_layouts_do_not_change_the_figures(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    section = write_files(tmp_path)
    [expected] = ranks(1).run(_evaluated, section, Parallelism())
    assert set(expected) == {*ITEMS, "text"}
    for found in ranks(4).run(_evaluated, section, Parallelism(**LAYOUTS[layout])):
        for task, metrics in expected.items():
            assert found[task] == pytest.approx(metrics, rel=1e-5), task


SMALL: dict[str, Any] = dict(
    training=dict(steps=4), checkpoint=dict(interval=2), model=CONFIG, sample=dict(tokens=5, interval=2, prompt="a")
)


def records(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    found = [{k: v for k, v in line.items() if not k.endswith("seconds")} for line in lines]
    return [line for line in found if any(key.startswith(("evaluation/", "sample")) for key in line)]


def test_evaluation_in_training_is_recorded_and_changes_nothing(ranks: Ranks, tmp_path: Path) -> None:
    section = dataclasses.replace(write_files(tmp_path / "files"), interval=2)
    plain = SMALL | dict(sample=Sample())
    expected = train(ranks(2), tiny(tmp_path, "plain", **plain))
    found = train(ranks(2), tiny(tmp_path, "evaluated", **SMALL, evaluation=section))
    assert found.losses == expected.losses
    for name, value in expected.state["model"].items():
        assert torch.equal(found.state["model"][name], value), name
    recorded = records(tmp_path, "evaluated")
    assert [record["step"] for record in recorded] == [2, 4]
    assert not records(tmp_path, "plain")
    keys = {"step", "sample", "evaluation/piqa/acc", "evaluation/lambada/perplexity", "evaluation/text/bits_per_byte"}
    assert keys <= recorded[0].keys()
    assert recorded[0]["sample"].startswith("a")
    # The metrics are those of the checkpoint of that step.
    state = read_whole(tmp_path / "evaluated/checkpoints/step-00000004")["model"]
    model = build_model(CONFIG)
    model.load_state_dict(state)
    values = ranks(1).run(_evaluate_state, section, state)[0]
    for name, metrics in values.items():
        for metric, value in metrics.items():
            assert recorded[1][f"evaluation/{name}/{metric}"] == pytest.approx(value, rel=1e-5), (name, metric)


def _evaluate_state(section: Evaluation, state: dict[str, torch.Tensor]) -> dict[str, dict[str, float]]:
    model = build_model(CONFIG)
    model.load_state_dict(state)
    evaluator = evaluator_of(section)
    evaluator.training = Training(seq_len=32, local_batch_size=1)
    return evaluator.evaluate(model, mesh_of("cpu"))


BAD_LINES = [
    ('{"activity_label": "a", "ctx_a": "b", "ctx_b": "c", "endings": ["d"], "label": "1"}', "'1' is not the index of one"),
    ('{"goal": "a", "sol1": "b", "sol2": "c", "label": 0.7}', "0.7 is not the index of one of 2 choices"),
    ('{"question": "a", "choices": {"text": ["b"], "label": ["A"]}, "answerKey": "C"}', "answerKey = 'C' is not one of"),
    ('{"text": "a b"}\n{"goal": ""}', "line 2: no field 'text', which the format lambada of this file requires"),
    ("{", "not an item of a task"),
    ("", "has no items"),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "message"), BAD_LINES)
def test_a_file_that_is_not_a_task_is_refused(lines: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "task.jsonl"
    file.write_text(f"{lines}\n")
    with pytest.raises(UserError, match=message):
        read_task(str(file))
    [problem] = evaluation_files(Evaluation(tasks=(str(file),)))
    assert re.search(message, problem) and str(file) in problem


def test_contradictions_of_the_section_are_refused(tmp_path: Path) -> None:
    one = Evaluation(tasks=("a.jsonl",), interval=1)
    assert not [*Evaluation().problems(), *one.problems()]
    [problem] = dataclasses.replace(one, data=("other/a.txt",)).problems()
    assert "2 files of evaluation have the name 'a'" in problem
    missing = [*evaluation_files(dataclasses.replace(one, data=(str(tmp_path / "none.txt"),)))]
    assert len(missing) == 2 and "none.txt' does not exist" in missing[0] and "a.jsonl cannot be read" in missing[1]
