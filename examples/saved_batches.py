"""Batches that another program saved, as a data source. docs/coming_from.md compares a migrated job with them.

In a copy of recipes/pretrain.py, pass `open_sources=open_sources` to `build_dataloaders`. A file `batches/STEP-*.npz` has the
arrays `input` and `labels` (N, T) of a micro-batch, and may have `positions`, which restart at each document.
"""

from pathlib import Path

import numpy as np

from titanlike.config import UserError
from titanlike.config.sections import Data
from titanlike.data.batches.packed_dataset import SequenceBatch
from titanlike.data.batches.sources import Sources
from titanlike.data.tokens.tokenizer import Tokenizer


class SavedBatches:
    """The sequences of a step are in its files, in the order of their names."""

    fingerprint = "saved batches"

    def __init__(self, seq_len: int) -> None:
        self.seq_len = seq_len

    def read(self, step: int, rows: range) -> SequenceBatch:
        """Returns these rows of the global batch of a step."""
        files = [np.load(path) for path in sorted(Path("batches").glob(f"{step}-*.npz"))]
        if not files or sum(len(file["input"]) for file in files) <= rows[-1]:
            raise UserError(f"batches/{step}-*.npz: fewer than {rows[-1] + 1} sequences of step {step}")
        names = [name for name in ("input", "labels", "positions") if name in files[0]]
        tokens, labels, *positions = (np.concatenate([file[name] for file in files])[list(rows)] for name in names)
        documents = None
        if positions:
            documents = (positions[0] == 0).cumsum(1)
            documents = np.concatenate([documents, documents[:, -1:]], 1)
        return SequenceBatch(
            np.array(rows), np.concatenate([tokens, labels[:, -1:].clip(0)], 1), document_ids=documents, labels=labels
        )

    def position(self) -> None:
        """The step is the only state."""

    def load_position(self, position: object) -> None:
        """There is none."""

    def describe(self, steps: int) -> str:
        """Summarizes the data."""
        return "saved batches"


def open_sources(section: Data, tokenizer: Tokenizer, *, seq_len: int, **_: object) -> Sources:
    """Opens the saved batches, without validation."""
    return Sources(SavedBatches(seq_len))
