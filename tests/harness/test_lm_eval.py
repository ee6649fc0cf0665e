"""Scores equal those of lm-evaluation-harness's own model class on the exported folder. Requires the harness:

pip install "lm_eval[hf]>=0.4.9" && pytest -n 0 tests/harness
"""

import importlib.util
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.interop.models import LLAMA, export_model, model_of
from titanlike.config.sections import Data, Evaluation, Sample, Tokenizer, Training
from titanlike.data.tokens.tokenizer import build_tokenizer
from titanlike.inference.evaluator import Evaluator
from titanlike.parallelisms.mesh import build_mesh

if importlib.util.find_spec("lm_eval") is None:
    pytest.skip("lm-evaluation-harness is not installed; .ci/run installs it", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # warnings of the harness are not ours

SENTENCE = (
    "the quick brown fox [title] jumps over two lazy dogs while a cat [sleeps] near stone bridges éclair naïve 漢字"
)
WORDS = SENTENCE.split()

# The definitions that the harness ships, on local files.
YAML: dict[str, str] = {
    "hellaswag": "output_type: multiple_choice\nprocess_docs: !function hellaswag.process_docs\n"
    'doc_to_text: "{{query}}"\ndoc_to_target: "{{label}}"\ndoc_to_choice: choices\n',
    "arc": 'output_type: multiple_choice\ndoc_to_text: "Question: {{question}}\\nAnswer:"\n'
    'doc_to_target: "{{choices.label.index(answerKey)}}"\ndoc_to_choice: "{{choices.text}}"\n',
    "piqa": 'output_type: multiple_choice\ndoc_to_text: "Question: {{goal}}\\nAnswer:"\ndoc_to_target: label\n'
    'doc_to_choice: "{{[sol1, sol2]}}"\n',
    "lambada": "output_type: loglikelihood\ndoc_to_text: \"{{text.split(' ')[:-1]|join(' ')}}\"\n"
    "doc_to_target: \"{{' '+text.split(' ')[-1]}}\"\n",
}
METRICS = {"lambada": ("acc", "perplexity")}


def make_items(format: str, count: int) -> list[dict[str, Any]]:
    rng = random.Random(format)

    def text(least: int, most: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(least, most)))

    def arc() -> dict[str, Any]:
        labels = list("ABCDE"[: rng.randint(3, 5)])
        choices = {"text": [text(1, 5) for _ in labels], "label": labels}
        return dict(question=text(5, 70), choices=choices, answerKey=rng.choice(labels))

    make: dict[str, Callable[[], dict[str, Any]]] = {
        "hellaswag": lambda: dict(
            activity_label=text(1, 3), ctx_a=text(3, 9) + ".", ctx_b=text(1, 4), label=str(rng.randrange(4)),
            endings=[text(2, 9) for _ in range(4)],
        ),
        "arc": arc,
        "piqa": lambda: dict(goal=text(4, 9), sol1=text(2, 9), sol2=text(2, 9), label=rng.randrange(2)),
        "lambada": lambda: dict(text=text(5, 15)),
    }  # fmt: skip
    return [make[format]() for _ in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with task files, their definitions for the harness, and a model."""
    path: Path = tmp_path_factory.mktemp("tasks")
    for format, definition in YAML.items():
        (path / f"{format}.jsonl").write_text(
            "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in make_items(format, 20))
        )
        metrics = "".join(f"  - metric: {name}\n" for name in METRICS.get(format, ("acc", "acc_norm")))
        source = (
            f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {path}/{format}.jsonl\ntest_split: test\n"
        )
        (path / f"{format}.yaml").write_text(f"task: local_{format}\n{source}{definition}metric_list:\n{metrics}")
    from lm_eval.tasks.hellaswag import utils

    (path / "hellaswag.py").write_text(Path(utils.__file__).read_text())
    export_model(model_of(LLAMA), LLAMA, path / "hf")
    return path


def run_harness(model: str, arguments: str, folder: Path) -> dict[str, dict[str, float]]:
    """Runs the program of the harness, which chooses the device. Returns the metrics of each task."""
    out = folder / f"{model}.out"
    command = [
        *(sys.executable, "-m", "titanlike.tools.cli.main", "lm_eval", "--model", model, "--model_args", arguments),
        *("--tasks", ",".join(f"local_{format}" for format in YAML), "--include_path", str(folder)),
        *("--output_path", str(out), "--batch_size", "4"),
    ]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    (file,) = out.rglob("results_*.json")
    results = json.loads(file.read_text())["results"]
    file.unlink()
    return {
        format: {key.split(",")[0]: value for key, value in results[f"local_{format}"].items() if key.endswith(",none")}
        for format in YAML
    }


def test_scores_equal_those_of_the_harness(folder: Path, alone: None) -> None:
    reference = run_harness("hf", f"pretrained={folder}/hf,dtype=float32", folder)
    as_model = run_harness("titanlike", f"path={folder}/hf", folder)
    section = Evaluation(tasks=tuple(f"{folder}/{format}.jsonl" for format in YAML))
    training = Training(seq_len=64, local_batch_size=4)
    tokenizer = build_tokenizer(Tokenizer(), LLAMA.vocab_size)
    evaluator = Evaluator(section, Sample(), Data(), training, LLAMA, tokenizer, 0)
    ours = evaluator.evaluate(model_of(LLAMA), build_mesh("cpu"))
    for format in YAML:
        for metric in METRICS.get(format, ("acc", "acc_norm")):
            expected = reference[format][metric]
            assert ours[format][metric] == pytest.approx(expected, rel=1e-4), (format, metric)
            assert as_model[format][metric] == pytest.approx(expected, rel=1e-4), (format, metric)
    scores = [reference[format][metric] for format in YAML for metric in METRICS.get(format, ("acc", "acc_norm"))]
    assert len(set(scores)) > 3


def test_requests_of_the_harness(folder: Path, alone: None) -> None:
    """Log-likelihoods, also of texts longer than the context, and greedy text."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from titanlike.tools.harness import TitanlikeLM

    path = str(folder / "hf")
    reference = HFLM(pretrained=path, device="cpu", batch_size=3, dtype="float32")
    ours = TitanlikeLM(path=path, device="cpu", batch_size=3)

    def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
        return [Instance(kind, {}, argument, index) for index, argument in enumerate(arguments)]

    pairs = [
        ("", "a first text"),
        ("with space ", "after"),
        ("x " * 400, "cut on the left"),
        ("naïve", " 漢字"),
        ("a", "b"),
    ]
    requests = instances("loglikelihood", pairs)
    found, expected = ours.loglikelihood(requests), reference.loglikelihood(requests)
    for one, other in zip(found, expected, strict=True):
        assert one[0] == pytest.approx(other[0], rel=1e-4)
        assert one[1] == other[1]

    requests = instances("loglikelihood_rolling", [("short",), ("a longer text " * 60,), ("exactly " * 32,)])
    assert ours.loglikelihood_rolling(requests) == pytest.approx(reference.loglikelihood_rolling(requests), rel=1e-4)

    options = {"until": ["q", "zz"], "max_gen_toks": 24, "do_sample": False}
    requests = instances("generate_until", [("def main", options), ("a", options), ("x " * 200, options)])
    # The vocabulary has more rows than the tokenizer has tokens, which transformers may choose.
    with torch.no_grad():
        reference.model.lm_head.weight[ours.tokenizer.vocab_size :] = 0.0
    assert ours.generate_until(requests) == reference.generate_until(requests)
