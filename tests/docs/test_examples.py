"""The programs in examples/, each compared with one process."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ema
import float8
import fsdp_tensor
import numpy as np
import own_data
import own_optimizer
import pipeline
import pytest
import qk_norm

from tests.launching import ROOT, SMALL, environment, free_port, losses, python, run
from tests.pool import Ranks
from tests.programs import blocks, edited
from titanlike.data.batches.packed_dataset import positions_in_documents, separate_documents
from titanlike.data.batches.sources import open_sources
from titanlike.data.tokens.tokenizer import build_tokenizer
from titanlike.losses import IGNORE
from titanlike.tools.programs import load_known


@pytest.mark.parametrize(
    ("example", "processes", "tolerance"),
    [
        (fsdp_tensor.main, 4, 1e-5),
        (pipeline.main, 4, 1e-5),
        (qk_norm.main, 4, 1e-4),
        (own_optimizer.main, 2, 1e-5),
        (own_data.main, 2, 1e-5),
        (ema.main, 2, 1e-5),
    ],
    ids=lambda value: value.__module__ if callable(value) else None,
)
def test_an_example_matches_one_process(
    ranks: Ranks, example: Callable[[], float], processes: int, tolerance: float
) -> None:
    assert max(ranks(processes).run(example)) < tolerance


@pytest.mark.slow
def test_float8_stays_near_float32(ranks: Ranks) -> None:
    for layout, one in ranks(4).run(float8.main):
        assert 1e-4 < layout < 0.02 and 1e-4 < one < 0.02  # it rounds, and trains all the same


def _hashes(done: subprocess.CompletedProcess[str], first_step: int) -> set[tuple[str, str]]:
    assert done.returncode == 0, done.stderr
    assert f"started at step {first_step}," in done.stdout
    return set(re.findall(r"rank (\d): started at step \d, weights (\w{16})", done.stdout))


def test_a_killed_loop_with_checkpoints_ends_with_the_same_weights(tmp_path: Path) -> None:
    def run(folder: str, *options: str) -> subprocess.CompletedProcess[str]:
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
        return python(tmp_path, *torchrun, str(ROOT / "examples/checkpoints.py"), folder, *options)

    expected = _hashes(run("undisturbed"), 1)
    assert len(expected) == 2
    killed = run("killed", "--kill-at=6")
    assert killed.returncode and "started at" not in killed.stdout
    saved = max(int(path.name.removeprefix("step-")) for path in (tmp_path / "killed").glob("step-*[0-9]"))
    assert saved in (2, 4) and _hashes(run("killed"), saved + 1) == expected


@pytest.mark.slow
def test_the_command_of_an_example_runs() -> None:
    command = str(Path(sys.executable).parent / "torchrun")
    done = subprocess.run(
        [command, "--nproc-per-node=2", f"--master-port={free_port()}", "examples/fsdp_tensor.py"],
        cwd=ROOT, env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("largest difference of a loss from one process: ") == 2


@pytest.mark.parametrize("masks", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_imported_run_on_saved_batches_continues_with_the_same_losses(masks: bool, tmp_path: Path) -> None:
    """The comparison of docs/coming_from.md, with a checkpoint in torchtitan's format that a run exports."""
    keys: Any = {"training.compute_dtype": "float32", "compile.mode": "none", "checkpoint.interval": "4"}
    keys["data.document_masks"] = str(masks).lower()
    keys = SMALL | keys | {"training.steps": "8", "run.name": "first"}
    debug = str(ROOT / "train_configs/debug.toml")
    done = run(tmp_path, debug, **keys)
    assert done.returncode == 0, done.stderr
    (tmp_path / "train.toml").write_text(run(tmp_path, debug, "--resolved", **keys).stdout)
    cli = ("-m", "titanlike.tools.cli.main")
    for words in (
        ("export", "runs/first", "exported", "--step", "4", "--format", "dcp_0_2"),
        ("recipes", "copy", "debug", "custom/check.toml"),
    ):
        done = python(tmp_path, *cli, *words)
        assert done.returncode == 0, done.stderr
    (check,) = (text for text in blocks(ROOT / "docs/coming_from.md", "toml") if 'program = "check"' in text)
    if masks:  # as the positions say
        check = edited(check, ('path = ""\n', 'path = ""\ndocument_masks = false\n'))
    (tmp_path / "custom/check.toml").write_text(check)
    (tmp_path / "custom/saved_batches.py").write_text((ROOT / "examples/saved_batches.py").read_text())
    program = tmp_path / "custom/check.py"
    program.write_text(
        edited(
            program.read_text(),
            ("import torch\n", "import torch\nfrom saved_batches import open_sources\n"),
            ("tokenizer, seed=seed, validate", "tokenizer, seed=seed, open_sources=open_sources, validate"),
        )
    )
    done = python(tmp_path, *cli, "import", "exported", "custom/check.toml")
    assert done.returncode == 0 and "weights and optimizer state of step 4" in done.stdout, done.stderr
    recipe = load_known(tmp_path / "train.toml", {})
    training = recipe.training
    tokenizer = build_tokenizer(recipe.tokenizer, recipe.model.vocab_size)
    sources = open_sources(
        recipe.data, tokenizer, seq_len=training.seq_len,
        global_batch_size=training.global_batch_size, seed=recipe.run.seed, validate=False,
    )  # fmt: skip
    (tmp_path / "batches").mkdir()
    num_masked = 0
    for step in (5, 6, 7):
        for part in (range(2), range(2, 4)):
            tokens = sources.training.read(step, part).tokens
            arrays = {"input": tokens[:, :-1], "labels": tokens[:, 1:]}
            if masks:  # positions and labels as torchtitan 0.3 has them
                documents = separate_documents(tokens, tokenizer.separator)
                is_first = documents[:, 1:] != documents[:, :-1]
                num_masked += is_first.sum()
                arrays["labels"] = np.where(is_first, IGNORE, arrays["labels"])
                arrays["positions"] = positions_in_documents(documents)[:, :-1]
            np.savez(tmp_path / f"batches/{step}-{part.start}.npz", **arrays)
    assert bool(num_masked) == masks
    done = run(tmp_path, "custom/check.toml")
    assert done.returncode and "batches/8-*.npz: fewer than 4 sequences of step 8" in done.stderr
    found, expected = losses(tmp_path / "runs/check"), losses(tmp_path / "runs/first")
    assert [*found] == [5, 6, 7]
    assert all(abs(loss - expected[step]) < 1e-5 for step, loss in found.items())
