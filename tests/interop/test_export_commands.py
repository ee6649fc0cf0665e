"""`titanlike export` and `titanlike import` as a user calls them."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.interop.models import CONFIGS, LLAMA, T5, MemoryWeights
from tests.launching import ROOT, SMALL, python, run
from titanlike.config import UserError
from titanlike.config.sections import Tokenizer
from titanlike.data.tokens.tokenizer import SPLIT_PATTERN
from titanlike.interop.hf_folder import fields_of
from titanlike.models.gemma.config import Gemma2Config
from titanlike.models.llama.config import LLAMA_SIZES, LlamaConfig
from titanlike.recipe import PretrainRecipe, load
from titanlike.tools.gguf_file import export_gguf
from titanlike.tools.gguf_vocabulary import vocabulary
from titanlike.tools.programs import load_known


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two checkpoints."""
    folder: Path = tmp_path_factory.mktemp("commands")
    options = SMALL | {"training.steps": "4", "checkpoint.interval": "2"}
    done = run(folder, **options, **{"run.name": "first"})
    assert done.returncode == 0, done.stderr
    return folder


def titanlike(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return python(folder, "-m", "titanlike.tools.cli.main", *words)


def test_the_tokenizer_of_an_export_may_be_elsewhere(runs: Path, tmp_path: Path) -> None:
    """As of a job whose files are gone. Another one is refused, as is an option without effect."""
    folder = tmp_path / "tokenizer"
    assert titanlike(runs, "export", "runs/first", str(folder)).returncode == 0
    options = {"tokenizer.encoding": str(folder), "run.name": "elsewhere", "run.dir": str(tmp_path / "runs")}
    done = run(tmp_path, **SMALL | options | {"training.steps": "2"})
    assert done.returncode == 0, done.stderr
    folder.rename(tmp_path / "moved")
    source = str(tmp_path / "runs/elsewhere")
    assert "neither a file nor a tiktoken encoding" in titanlike(tmp_path, "export", source, "model").stderr
    done = titanlike(tmp_path, "export", source, "model", "--tokenizer", "moved")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "model/tokenizer.json").is_file()
    other = titanlike(tmp_path, "export", source, "other", "--tokenizer", "bytes")
    assert "'bytes' is not the tokenizer of" in other.stderr and not (tmp_path / "other").exists()
    assert "omit it with" in titanlike(tmp_path, "export", source, "a", "--adapter", "--tokenizer", "moved").stderr


def test_export_and_import(runs: Path, tmp_path: Path) -> None:
    done = titanlike(runs, "export", "runs/first", str(tmp_path / "model"), "--dtype", "bfloat16")
    assert done.returncode == 0, done.stderr
    assert "bytes of weights, from runs/first/checkpoints/step-00000004\n" in done.stdout
    earlier = titanlike(runs, "export", "runs/first", str(tmp_path / "earlier"), "--step", "2")
    assert "from runs/first/checkpoints/step-00000002\n" in earlier.stdout
    done = titanlike(runs, "import", str(tmp_path / "model"), str(tmp_path / "next.toml"))
    assert done.returncode == 0, done.stderr
    # The recipe needs data, and has a learning rate for weights that are trained.
    checked = run(tmp_path, "next.toml", "--check", "2")
    message = "error: data.source = 'chat' requires data.path, which is empty; set it, or data.mixture\n"
    assert (checked.returncode, checked.stderr) == (2, message)
    (tmp_path / "chats.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 99)
    options = {"data.path": str(tmp_path / "chats.jsonl")}
    checked = run(tmp_path, "next.toml", "--check", "2", **options)
    assert checked.returncode == 0, checked.stderr
    imported = load_known(tmp_path / "next.toml", options)
    assert imported.optimizer.lr == 1e-5 and imported.schedule.decay == "cosine"


def test_a_config_has_the_name_of_its_published_size() -> None:
    published = LlamaConfig.published(LLAMA_SIZES["3.2-1B"])
    assert published.size == "3.2-1B"
    assert LlamaConfig.from_hugging_face(published.to_hugging_face()) == published
    assert fields_of(published) == {"name": "llama", "size": "3.2-1B"}
    # Of a size, with other values in its folder.
    changed = LlamaConfig.published({**LLAMA_SIZES["3.2-1B"], "norm_eps": 1e-6})
    fields = fields_of(changed)
    assert fields == {"name": "llama", "size": "3.2-1B", "norm_eps": 1e-6}
    overrides = {f"model.{key}": str(value) for key, value in fields.items()}
    assert load(PretrainRecipe, ROOT / "train_configs/debug.toml", overrides).model == changed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export", "runs/frist", "out"], "runs/frist does not exist; give a run directory, a checkpoint or a Hugging Face"),
        (["export", "runs/first", "runs"], "runs exists; choose another name, or remove it"),
        (["export", "runs/first", "out", "--step", "3"], "runs/first/checkpoints has no step 3; it contains steps 2, 4"),
        (["export", "runs/first", "runs/first/recipe.toml/out"], "cannot be written: Not a directory"),
    ],
)  # fmt: skip
def test_a_mistake_has_one_message(runs: Path, words: list[str], message: str) -> None:
    before = sorted(runs.rglob("*"))
    done = titanlike(runs, *words)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {message}") or (message in done.stderr and done.stderr.startswith("error: "))
    assert done.stderr.count("\n") == 1 and done.stdout == ""
    assert sorted(runs.rglob("*")) == before


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (CONFIGS["Mistral, window"], "model.sliding_window = 40 has no equivalent in llama.cpp's llama, which has 0; use"),
        (CONFIGS["Qwen3-MoE, router not normalized"], "model.normalize_router = False has no equivalent"),
        (Gemma2Config(query_scalar=24.0), "model.query_scalar = 24.0 has no equivalent in llama.cpp's gemma2, which has 64"),
        (T5, "model.name = 't5' has no equivalent in GGUF; use --format hf"),
        (LLAMA, '--format gguf requires the package gguf; run: pip install "titanlike\\[gguf\\]"'),
    ],
)  # fmt: skip
def test_what_gguf_lacks_is_refused(config: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=message):
        export_gguf(MemoryWeights(nn.Module(), config, Tokenizer()), tmp_path / "model.gguf")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre_tokenizer": {"type": "Whitespace"}}, 'no pre-tokenizer that splits text by ["Whitespace"]; train a tokenizer with'),
        ({"normalizer": {"type": "Lowercase"}}, "no tokenizer with the normalizer Lowercase"),
        ({"model": {"type": "Unigram"}}, "'Unigram' is not exported to GGUF, only 'BPE' is"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_llama_cpp_would_run_in_another_way_is_refused(change: dict[str, Any], message: str) -> None:
    split = {"type": "Split", "pattern": {"Regex": SPLIT_PATTERN}}
    content = {
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]], "ignore_merges": True},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, {"type": "ByteLevel", "use_regex": False}]},
        "normalizer": None,
    }
    assert vocabulary(content, 3, "tokenizer.encoding")["pre"] == "llama-bpe"
    with pytest.raises(UserError, match=f"^tokenizer.encoding: .*{re.escape(message)}"):
        vocabulary(content | change, 3, "tokenizer.encoding")
