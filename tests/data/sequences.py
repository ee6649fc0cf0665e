"""Sequences and streams with known tokens."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from titanlike.config.sections import Tokenizer as Section
from titanlike.data.batches.loader import BatchLoader
from titanlike.data.batches.packed_dataset import BatchSource, PackedDataset, ShuffledMixture
from titanlike.data.batches.stream import Stream
from titanlike.data.documents.data_files import File
from titanlike.data.documents.listing import list_files
from titanlike.data.documents.readers import Fields
from titanlike.data.tokens.arrays import InMemoryTokens
from titanlike.data.tokens.tokenizer import Separator, build_tokenizer


def batches(
    data: PackedDataset | BatchSource,
    *,
    ranks: int = 1,
    rank: int = 0,
    local: int = 2,
    seed: int = 0,
    document_separator: Separator | None = None,
) -> BatchLoader:
    source = ShuffledMixture([data], seed=seed, global_batch_size=8) if isinstance(data, PackedDataset) else data
    return BatchLoader(
        source, global_batch_size=8, local_batch_size=local, data_rank=rank, num_data_ranks=ranks, seed=seed,
        device=torch.device("cpu"), document_separator=document_separator,
    )  # fmt: skip


def counting(count: int, *, held_out: bool = False, every: int = 0, seq_len: int = 4, start: int = 0) -> PackedDataset:
    """Returns sequences of 0 1 2 3 | 4 5 6 7 | ..., identified by their first token."""
    tokens = InMemoryTokens(np.arange(start, start + count * seq_len + 1, dtype=np.uint32))
    return PackedDataset(tokens, seq_len, held_out=held_out, holdout_every=every)


BYTES = build_tokenizer(Section())


def write(folder: Path, sizes: Sequence[int], name: str = "part") -> list[File]:
    """Writes files with these numbers of documents, each with a unique text."""
    folder.mkdir(exist_ok=True)
    for number, size in enumerate(sizes):
        lines = [json.dumps({"text": f"{name}{number}.{line} " * (1 + line % 4)}) for line in range(size)]
        (folder / f"{name}{number:02}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return list_files(str(folder / f"{name}*"))


def open_stream(sources: Sequence[Sequence[File]], **options: Any) -> Stream:
    weights = options.pop("weights", [1.0] * len(sources))
    usual = dict(fields=Fields(), seq_len=16, global_batch_size=8, seed=0)
    return Stream(sources, weights, BYTES, **usual | options)


def read_steps(
    build: Callable[[], BatchSource], stops: list[int], steps: int, size: int, ranks: int, local: int, prefetch: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns tokens and labels of each global batch, read by loaders that are rebuilt and resumed after each of the stops."""
    found: list[list[Any]] = [[] for _ in range(steps)]
    position, first = None, 1
    for last in [*sorted(stops), steps]:
        entries = {}
        for rank in range(ranks):
            source = build()
            source.load_position(json.loads(json.dumps(position)))
            batches = BatchLoader(
                source, global_batch_size=size, local_batch_size=local, data_rank=rank, num_data_ranks=ranks, seed=0,
                device=torch.device("cpu"),
            )  # fmt: skip
            with batches.prefetch(prefetch, first, steps):  # also beyond the stop
                for step in range(first, last + 1):
                    found[step - 1] += batches.microbatches(step)
            entries |= {entry[0]: entry for entry in batches._position or ()}
        # A loader that stops at its first step has read nothing: its position stays the one that it resumed from.
        position = list(entries.values()) or position
        first = last + 1
    return [
        (np.concatenate([b.inputs["tokens"] for b in step]), np.concatenate([b.labels for b in step])) for step in found
    ]
