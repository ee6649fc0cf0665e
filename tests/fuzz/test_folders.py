"""Damaged checkpoint, run and data folders: each either works with the right result, or is refused with one sentence.

The damage is random, with a seed in each test. It is applied to copies of valid folders, in this process.
"""

import functools
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoints import small_model
from tests.fuzz.damage import damage, refused_or
from tests.training import tiny
from titanlike.checkpoint import CheckpointManager, CheckpointMetadata
from titanlike.config.sections import Checkpoint, Data
from titanlike.config.sections import Tokenizer as Section
from titanlike.data.batches.sources import open_sources
from titanlike.data.tokens.shard_writer import ShardWriter
from titanlike.data.tokens.shards import Manifest
from titanlike.data.tokens.tokenizer import build_tokenizer
from titanlike.run import run_dir
from titanlike.run.changes import check_resume
from titanlike.run.run_dir import RunDirectory, recipe_as_json


@pytest.fixture(autouse=True)
def _faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out fsync and git, which take most of the time and have no part in what is tested."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(run_dir, "_git", lambda *_: None)


def copy_of(folder: Path, copy: Path) -> Path:
    if copy.exists():
        shutil.rmtree(copy)
    shutil.copytree(folder, copy, symlinks=True)
    return copy


# Checkpoints.


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with checkpoints of steps 1, 2 and 3, in which all weights equal the step."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    folder: Path = tmp_path_factory.mktemp("saved")
    try:
        recipe = tiny(folder, "run", training=dict(steps=5))
        run = RunDirectory(recipe)
        run.path.mkdir()
        (run.path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
        with CheckpointManager(str(folder / "shared"), Checkpoint(mode="sync", keep=9), owner=run.path) as checkpoints:
            model, optimizer = small_model()
            checkpoints.archive_after(0)
            for step in (1, 2, 3):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.fill_(step)
                metadata = CheckpointMetadata(step, recipe_as_json(recipe), "data", {"shard": 1}, {"device": "cpu"})
                checkpoints.save(model, optimizer, metadata)
    finally:
        torch.distributed.destroy_process_group()
    return folder


def resume(folder: Path) -> int:
    """Resumes as a recipe does, and saves the next step. Returns the step from which it resumed."""
    recipe = tiny(folder, "run", training=dict(steps=5))
    model, optimizer = small_model()
    options = Checkpoint(mode="sync", keep=9, max_failures=1)
    with CheckpointManager(str(folder / "shared"), options, owner=folder / "run") as checkpoints:
        found = checkpoints.find()
        if found:
            check_resume(found, CheckpointMetadata(0, found.recipe, "data", {"shard": 1}, {"device": "cpu"}), recipe)
            checkpoints.load(model, optimizer, found)
            assert all((parameter == found.step).all() for parameter in model.parameters())
        step = found.step if found else 0
        checkpoints.archive_after(step)
        RunDirectory(recipe).open(torch.device("cpu"), resumed_step=step)
        metadata = CheckpointMetadata(step + 1, {}, "data", {"shard": 1}, {"device": "cpu"})
        checkpoints.save(model, optimizer, metadata, wait=True)
        assert checkpoints.newest().is_dir()
        assert checkpoints.store.steps()[-1] == step + 1
    return step


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_damaged_checkpoint_folders(saved: Path, tmp_path: Path, alone: None, seed: int) -> None:
    random_ = random.Random(seed)
    outcomes: list[Any] = []
    for _ in range(50):
        folder = copy_of(saved, tmp_path / "copy")
        (folder / "shared/owner.json").write_text(
            (folder / "shared/owner.json").read_text().replace(str(saved), str(folder))
        )
        where = random_.choice(["shared", "shared", "shared/step-00000003", "shared/step-00000003", "."])
        done = damage(folder / where, random_)
        outcomes.append(refused_or(functools.partial(resume, folder), done))
    steps = [outcome for outcome in outcomes if isinstance(outcome, int)]
    assert {2, 3} <= set(steps) <= {0, 1, 2, 3}
    assert 10 < len(steps) < 50


# Data.


def write_shards(folder: Path) -> None:
    folder.mkdir()
    splits = {}
    for split, count in (("train", 3), ("validation", 1)):
        shards = []
        for number in range(count):
            writer = ShardWriter(folder, f"{split}-{number:05d}", np.uint16)
            for document in range(20):
                writer.add(np.append(np.arange(30, dtype=np.uint16) + document, np.uint16(256)), document % 5)
            shards.append(writer.close())
        splits[split] = shards
    tokenizer = build_tokenizer(Section())
    recorded = {"fingerprint": tokenizer.fingerprint, "encoding": "bytes", "special": "eos"}
    Manifest("uint16", recorded, splits, {"files": ["a"]}).write(folder)


def read_all(data: Data, vocab: int = 320) -> tuple[str, int]:
    """Reads two epochs of the data as a run does. Returns the fingerprint and the sum of all tokens."""
    tokenizer = build_tokenizer(Section(), vocab)
    opened = open_sources(data, tokenizer, seq_len=16, global_batch_size=4, seed=0, validate=True)
    fingerprint = opened.training.fingerprint
    total = 0
    for source in (opened.training, opened.validation):
        assert source
        source.describe(9)
        for step in range(1, 30):
            batch = source.read(step, range(4))
            assert batch.tokens.shape == (4, 17) and batch.tokens.min() >= 0 and batch.tokens.max() < vocab
            total += int(batch.tokens.sum())
    return fingerprint, total


def test_damaged_token_shards(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards")
    random_ = random.Random(3)
    copy = tmp_path / "copy"
    data = Data(source="shards", path=str(copy))
    copy_of(tmp_path / "shards", copy)
    expected = read_all(data)
    read = refused = 0
    for _ in range(60):
        copy_of(tmp_path / "shards", copy)
        done = damage(copy, random_)
        found = refused_or(lambda: read_all(data), done)
        if isinstance(found, str):
            refused += 1
            continue
        read += 1
        # The same tokens, or data that a resume distinguishes; the fingerprint covers all of so small training data.
        assert found == expected or found[0] != expected[0] or "validation" in done, done
    assert read and refused > 20
