"""Whatever the sizes, ranks, accumulation, threads and stops: one global stream, each window once an epoch, resumed exactly."""

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
from titanlike.data import stream
from titanlike.data.loader import BatchLoader
from titanlike.data.packed_dataset import BatchSource, PackedDataset, ShuffledMixture
from titanlike.data.stream import Stream
from titanlike.data.text.documents import Fields
from titanlike.data.text.files import list_files
from titanlike.data.text.tokenizer import build_tokenizer
from titanlike.data.token_shards import Manifest, Shards, ShardWriter

BYTES = build_tokenizer(Section())
STEPS = 8

Sizes = st.lists(st.integers(1, 60), min_size=1, max_size=4)


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, Any]:
    """Ranks that divide a global batch, how many sequences each takes at once, and how many batches are made ahead."""
    size = draw(st.integers(1, 8))
    ranks = draw(st.sampled_from([number for number in range(1, size + 1) if size % number == 0]))
    return dict(size=size, ranks=ranks, local=draw(st.integers(1, size // ranks)), ahead=draw(st.integers(0, 3)))


def read(
    make: Callable[[], BatchSource], stops: list[int], size: int, ranks: int, local: int, ahead: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens and labels of each step's global batch, by processes that end and begin anew after each of the stops."""
    found: list[list[Any]] = [[] for _ in range(STEPS)]
    position, first = None, 1
    for last in [*sorted(stops), STEPS]:
        lanes = {}
        for rank in range(ranks):
            feed = make()
            feed.begin(json.loads(json.dumps(position)))
            batches = BatchLoader(
                feed, global_batch_size=size, local_batch_size=local, data_rank=rank, num_data_ranks=ranks, seed=0,
                device=torch.device("cpu"),
            )  # fmt: skip
            with batches.prefetch(ahead, first, STEPS):  # more than are asked for before the stop
                for step in range(first, last + 1):
                    found[step - 1] += batches.microbatches(step)
            lanes |= {lane[0]: lane for lane in batches._position or ()}
        # A process that stops at once has read nothing, and goes on from where it was told to.
        position = list(lanes.values()) or position
        first = last + 1
    return [
        (np.concatenate([b.inputs["tokens"] for b in step]), np.concatenate([b.labels for b in step])) for step in found
    ]


def assert_same(one: list[Any], other: list[Any]) -> None:
    for step, (ours, theirs) in enumerate(zip(one, other, strict=True), start=1):
        assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True)), f"step {step}"


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def write_shards(where: Path, sizes: list[int], start: int) -> Shards:
    """Shards of so many tokens, each token its own place in the row."""
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
    sizes = [[*each, 2 * seq_len + 1] for each in sizes]  # never too few
    with folder() as where:
        parts = [write_shards(where / str(n), each, 10_000 * n) for n, each in enumerate(sizes)]

        def make() -> BatchSource:
            windows = [PackedDataset(part, seq_len, holdout_every=every) for part in parts]
            return ShuffledMixture(windows, [1.0] * len(parts), seed=seed, global_batch_size=layout["size"])

        whole = read(make, [], layout["size"], 1, layout["size"], 0)
        assert_same(read(make, stops, **layout), whole)

    tokens = np.concatenate([tokens for tokens, _ in whole])
    labels = np.concatenate([labels for _, labels in whole])
    assert np.array_equal(tokens + 1, labels)  # whatever the borders of the shards
    for number, each in enumerate(sizes):
        starts = [int(row[0]) - 10_000 * number for row in tokens if row[0] // 10_000 == number]
        wanted = [n * seq_len for n in range((sum(each) - 1) // seq_len) if not every or (n + 1) % every]
        for epoch in range(0, len(starts), len(wanted)):
            part = starts[epoch : epoch + len(wanted)]
            assert sorted(part) == wanted if len(part) == len(wanted) else set(part) <= set(wanted)
            assert len(set(part)) == len(part)


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

        def make(workers: int = workers) -> BatchSource:
            return Stream(
                sources, [1.0] * len(sources), BYTES, fields=Fields(), seq_len=seq_len, global_batch_size=layout["size"],
                seed=seed, workers=workers,
            )  # fmt: skip

        whole = read(lambda: make(1), [], layout["size"], 1, layout["size"], 0)
        assert_same(read(make, stops, **layout), whole)


def test_a_position_that_is_a_token_off_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the test above can fail."""
    begin = Stream.begin

    def off(feed: Stream, position: list[Any] | None) -> None:
        begin(feed, position and [[n, t, [[*place[:-1], place[-1] + 1] for place in ps]] for n, t, ps in position])

    case = dict(sizes=[[9, 9]], seq_len=5, seed=0, stops=[3], workers=1, block=3)
    layout = dict(size=2, ranks=1, local=1, ahead=2)
    test_streams.hypothesis.inner_test(layout=layout, **case)  # type: ignore[attr-defined]
    monkeypatch.setattr(Stream, "begin", off)
    with pytest.raises(AssertionError, match="step 4"):
        test_streams.hypothesis.inner_test(layout=layout, **case)  # type: ignore[attr-defined]
