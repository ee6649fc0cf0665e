"""Property tests: one global stream for any ranks, accumulation, threads and interruptions, resumed exactly."""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlike.config.sections import Tokenizer as Section
from titanlike.data.batches import stream
from titanlike.data.batches.loader import BatchLoader
from titanlike.data.batches.packed_dataset import BatchSource, PackedDataset, ShuffledMixture
from titanlike.data.batches.stream import PackedText, Stream
from titanlike.data.documents.files import list_files
from titanlike.data.documents.readers import Fields
from titanlike.data.tokens.shard_writer import ShardWriter
from titanlike.data.tokens.shards import Manifest, Shards
from titanlike.data.tokens.tokenizer import build_tokenizer

BYTES = build_tokenizer(Section())
STEPS = 8

Sizes = st.lists(st.integers(1, 60), min_size=1, max_size=4)


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, Any]:
    """Draws a global batch size, data-parallel ranks that divide it, a local batch size and a number of prefetched batches."""
    size = draw(st.integers(1, 8))
    ranks = draw(st.sampled_from([number for number in range(1, size + 1) if size % number == 0]))
    return dict(size=size, ranks=ranks, local=draw(st.integers(1, size // ranks)), prefetch=draw(st.integers(0, 3)))


def read(
    build: Callable[[], BatchSource], stops: list[int], size: int, ranks: int, local: int, prefetch: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns tokens and labels of each global batch, read by loaders that are rebuilt and resumed after each of the stops."""
    found: list[list[Any]] = [[] for _ in range(STEPS)]
    position, first = None, 1
    for last in [*sorted(stops), STEPS]:
        entries = {}
        for rank in range(ranks):
            source = build()
            source.load_position(json.loads(json.dumps(position)))
            batches = BatchLoader(
                source, global_batch_size=size, local_batch_size=local, data_rank=rank, num_data_ranks=ranks, seed=0,
                device=torch.device("cpu"),
            )  # fmt: skip
            with batches.prefetch(prefetch, first, STEPS):  # also beyond the stop
                for step in range(first, last + 1):
                    found[step - 1] += batches.microbatches(step)
            entries |= {entry[0]: entry for entry in batches._position or ()}
        # A loader that stops at its first step has read nothing: its position stays the one that it resumed from.
        position = list(entries.values()) or position
        first = last + 1
    return [
        (np.concatenate([b.inputs["tokens"] for b in step]), np.concatenate([b.labels for b in step])) for step in found
    ]


def assert_same(one: list[Any], other: list[Any]) -> None:
    for step, pair in enumerate(zip(one, other, strict=True), start=1):
        assert all(np.array_equal(a, b) for a, b in zip(*pair, strict=True)), f"step {step}"


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


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


@given(
    sizes=st.lists(Sizes, min_size=1, max_size=3), seq_len=st.integers(2, 9), seed=st.integers(0, 2**40), layout=layouts(),
    stops=st.lists(st.integers(1, STEPS), max_size=2), every=st.sampled_from([0, 2, 3]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_shards(
    sizes: list[list[int]], seq_len: int, seed: int, layout: dict[str, Any], stops: list[int], every: int
) -> None:
    sizes = [[*each, 2 * seq_len + 1] for each in sizes]  # at least two sequences
    with folder() as where:
        parts = [write_shards(where / str(n), each, 10_000 * n) for n, each in enumerate(sizes)]

        def build() -> BatchSource:
            datasets = [PackedDataset(part, seq_len, holdout_every=every) for part in parts]
            return ShuffledMixture(datasets, [1.0] * len(parts), seed=seed, global_batch_size=layout["size"])

        expected = read(build, [], layout["size"], 1, layout["size"], 0)
        assert_same(read(build, stops, **layout), expected)

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


@given(
    sizes=st.lists(Sizes, min_size=1, max_size=2), seq_len=st.integers(2, 40), seed=st.integers(0, 2**40), layout=layouts(),
    stops=st.lists(st.integers(1, STEPS), max_size=2), workers=st.integers(1, 3), block=st.sampled_from([1, 3, 256]),
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_streams(
    sizes: list[list[int]],
    seq_len: int,
    seed: int,
    layout: dict[str, Any],
    stops: list[int],
    workers: int,
    block: int,
) -> None:
    with folder() as where, mock.patch.object(stream, "BLOCK", block):
        sources = []
        for source, each in enumerate(sizes):
            for number, size in enumerate(each):
                lines = [json.dumps({"text": f"{source}.{number}.{line}" * (1 + line % 3)}) for line in range(size)]
                (where / f"{source}-{number}.jsonl").write_text("\n".join(lines))
            sources.append(list_files(str(where / f"{source}-*")))

        def build(workers: int = workers) -> BatchSource:
            return Stream(
                sources, [1.0] * len(sources), BYTES, fields=Fields(), seq_len=seq_len, global_batch_size=layout["size"],
                seed=seed, workers=workers,
            )  # fmt: skip

        expected = read(lambda: build(1), [], layout["size"], 1, layout["size"], 0)
        assert_same(read(build, stops, **layout), expected)


def test_a_position_that_is_off_by_one_token_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verifies that test_streams can fail."""
    reset = PackedText.reset

    def off_by_one(text: PackedText, initial_state: dict[str, Any] | None = None) -> None:
        if initial_state:
            *cursor, token = initial_state["cursor"]
            initial_state = {"cursor": [*cursor, token + 1]}
        reset(text, initial_state)

    case = dict(sizes=[[9, 9]], seq_len=5, seed=0, stops=[3], workers=1, block=3)
    layout = dict(size=2, ranks=1, local=1, prefetch=2)
    test_streams.hypothesis.inner_test(layout=layout, **case)  # type: ignore[attr-defined]
    monkeypatch.setattr(PackedText, "reset", off_by_one)
    with pytest.raises(AssertionError, match="step 4"):
        test_streams.hypothesis.inner_test(layout=layout, **case)  # type: ignore[attr-defined]
