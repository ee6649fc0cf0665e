"""Property tests: one global stream for any ranks, accumulation, threads and interruptions, resumed exactly."""

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.sequences import BYTES, counting, open_stream, read_steps, write
from titanlike.data.batches import stream
from titanlike.data.batches.loader import BatchLoader
from titanlike.data.batches.masked_tokens import MaskedSource
from titanlike.data.batches.packed_dataset import BatchSource, PackedDataset, ShuffledMixture
from titanlike.data.batches.stream import Stream
from titanlike.data.documents.listing import list_files
from titanlike.data.documents.readers import Fields
from titanlike.data.tokens.shard_writer import ShardWriter
from titanlike.data.tokens.shards import Manifest, Shards

STEPS = 8


def layout_of(draw: random.Random) -> dict[str, Any]:
    """Draws a global batch size, data-parallel ranks that divide it, a local batch size and a number of prefetched batches."""
    size = draw.randint(1, 8)
    ranks = draw.choice([number for number in range(1, size + 1) if size % number == 0])
    return dict(size=size, ranks=ranks, local=draw.randint(1, size // ranks), prefetch=draw.randint(0, 3))


def sizes_of(draw: random.Random, most: int) -> list[list[int]]:
    """Draws the sizes of the files of one or more sources."""
    return [[draw.randint(1, 60) for _ in range(draw.randint(1, 4))] for _ in range(draw.randint(1, most))]


def stops_of(draw: random.Random) -> list[int]:
    return [draw.randint(1, STEPS) for _ in range(draw.randint(0, 2))]


def assert_same(one: list[Any], other: list[Any]) -> None:
    for step, pair in enumerate(zip(one, other, strict=True), start=1):
        assert all(np.array_equal(a, b) for a, b in zip(*pair, strict=True)), f"step {step}"


def write_shards(where: Path, sizes: list[int], start: int) -> Shards:
    """Writes shards of these sizes, in which each token is its own index."""
    where.mkdir()
    shards = []
    for number, size in enumerate(sizes):
        writer = ShardWriter(where, f"train-{number:05}", np.uint16)
        writer.add(np.arange(start, start + size))
        shards.append(writer.close())
        start += size
    Manifest("uint16", {"fingerprint": "x"}, {"train": shards}, {}).write(where)
    return Shards(str(where))


@pytest.mark.parametrize("number", range(12))
def test_shards(number: int, tmp_path: Path) -> None:
    draw = random.Random(number)
    sizes, layout, stops, every = sizes_of(draw, 3), layout_of(draw), stops_of(draw), draw.choice((0, 2, 3))
    seq_len, seed = draw.randint(2, 9), draw.randrange(2**40)
    sizes = [[*each, 2 * seq_len + 1] for each in sizes]  # at least two sequences
    parts = [write_shards(tmp_path / str(n), each, 10_000 * n) for n, each in enumerate(sizes)]

    def build() -> BatchSource:
        datasets = [PackedDataset(part, seq_len, holdout_every=every) for part in parts]
        return ShuffledMixture(datasets, [1.0] * len(parts), seed=seed, global_batch_size=layout["size"])

    expected = read_steps(build, [], STEPS, layout["size"], 1, layout["size"], 0)
    assert_same(read_steps(build, stops, STEPS, **layout), expected)

    tokens = np.concatenate([tokens for tokens, _ in expected])
    labels = np.concatenate([labels for _, labels in expected])
    assert np.array_equal(tokens + 1, labels)  # across the boundaries of the shards
    for number, each in enumerate(sizes):
        starts = [int(row[0]) - 10_000 * number for row in tokens if row[0] // 10_000 == number]
        wanted = [n * seq_len for n in range((sum(each) - 1) // seq_len) if not every or (n + 1) % every]
        for epoch in range(0, len(starts), len(wanted)):
            found = starts[epoch : epoch + len(wanted)]
            assert sorted(found) == wanted if len(found) == len(wanted) else set(found) <= set(wanted)
            assert len(set(found)) == len(found)


@pytest.mark.parametrize("number", range(8))
def test_streams(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(number)
    sizes, seq_len, seed = sizes_of(draw, 2), draw.randint(2, 40), draw.randrange(2**40)
    layout, stops, workers = layout_of(draw), stops_of(draw), draw.randint(1, 3)
    monkeypatch.setattr(stream, "BLOCK", draw.choice((1, 3, 256)))
    sources = []
    for source, each in enumerate(sizes):
        for number, size in enumerate(each):
            lines = [json.dumps({"text": f"{source}.{number}.{line}" * (1 + line % 3)}) for line in range(size)]
            (tmp_path / f"{source}-{number}.jsonl").write_text("\n".join(lines))
        sources.append(list_files(str(tmp_path / f"{source}-*")))

    def build(workers: int = workers) -> BatchSource:
        return Stream(
            sources, [1.0] * len(sources), BYTES, fields=Fields(), seq_len=seq_len, global_batch_size=layout["size"],
            seed=seed, workers=workers,
        )  # fmt: skip

    expected = read_steps(lambda: build(1), [], STEPS, layout["size"], 1, layout["size"], 0)
    assert_same(read_steps(build, stops, STEPS, **layout), expected)


def test_a_seed_gives_the_batches_that_it_gave_in_earlier_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of an earlier version resumes with the batches that it would have read: several epochs, blocks and readers."""
    monkeypatch.setattr(stream, "BLOCK", 8)
    parts = [counting(50), counting(30, start=1000)]
    files = [write(tmp_path, [20, 20, 20]), write(tmp_path, [20, 20], "other")]
    mixture = ShuffledMixture(parts, [2, 1], seed=3, global_batch_size=8)
    sources = {
        "mixture": mixture,
        "stream": open_stream(files, weights=[2, 1], seed=3),
        "masked": MaskedSource(mixture, BYTES, 257, 0.5, seed=3, separate=False),
    }
    found = {}
    for name, source in sources.items():
        batches = BatchLoader(
            source, global_batch_size=8, local_batch_size=8, data_rank=0, num_data_ranks=1, seed=3,
            device=torch.device("cpu"), dropout_bits=True,
        )  # fmt: skip
        digest = hashlib.sha256()
        for step in range(1, 301):
            for batch in batches.microbatches(step):
                for values in (batch.inputs["tokens"], batch.labels, batch.inputs["dropout_bits"]):
                    digest.update(values.numpy().astype("<i8").tobytes())
        found[name] = digest.hexdigest()[:16]
    assert found == {"mixture": "9c8ac2fb017d5eff", "stream": "4ce7121795700d65", "masked": "668c642e39e61e4c"}
