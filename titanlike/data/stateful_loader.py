"""A user's own dataset, from torchdata's StatefulDataLoader or any other loader with a state."""

import base64
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from titanlike.config import UserError
from titanlike.data.packed_dataset import Position, SequenceBatch


class StatefulLoader(Protocol):
    """An iterable with a state, such as `StatefulDataLoader` or `torchdata.nodes.Loader`."""

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class StatefulLoaderSource:
    """A `BatchSource` that reads a loader per data rank and keeps the state of each in the checkpoint.

    `build_loader(data_rank, num_data_ranks)` returns the loader of one rank. Each of its items holds the rows of that rank for
    one step, global batch size / number of data ranks sequences of `seq_len` + 1 token ids, as a tensor or array (N, T + 1);
    or a dict with these `tokens` and a `loss_mask` of the same shape, True where a token is a label. When the loader is
    exhausted, its next epoch starts.
    """

    def __init__(
        self, build_loader: Callable[[int, int], StatefulLoader], *, seq_len: int, global_batch_size: int
    ) -> None:
        self.build_loader = build_loader
        self.seq_len = seq_len
        self.global_batch_size = global_batch_size
        self._rows: range | None = None
        self._resumed: Position | None = None
        self._state = ""
        self._items: Iterator[Any] = iter(())

    def describe(self, steps: int) -> str:
        return f"{steps * self.global_batch_size:,} sequences from a user's loader"

    def begin(self, position: Position | None) -> None:
        self._resumed, self._rows = position, None

    def position(self) -> Position:
        """Returns the rank, the number of ranks and the encoded state of the loader."""
        assert self._rows is not None, "the loader is built at the first step"
        return [[self._rank, self._num_ranks, self._state]]

    def read(self, step: int, rows: range) -> SequenceBatch:
        """Returns the next item of the loader. Steps must be read in order."""
        if rows != self._rows:
            self._open(rows)
        item = next(self._items, None)
        if item is None:
            self._items = iter(self._loader)
            item = next(self._items, None)
        if item is None:
            raise UserError(f"the loader of data rank {self._rank} yields no items; every epoch needs at least one")
        arrays = item if isinstance(item, dict) else {"tokens": item}
        tokens = self._check_shape("tokens", arrays["tokens"]).astype(np.int64)
        loss_mask = None
        if "loss_mask" in arrays:
            loss_mask = self._check_shape("loss_mask", arrays["loss_mask"]).astype(bool)
        self._state = self._encoded_state()
        sequence_ids = np.array(rows, np.int64) + (step - 1) * self.global_batch_size
        return SequenceBatch(sequence_ids, tokens, loss_mask)

    def _check_shape(self, name: str, values: Any) -> npt.NDArray[Any]:
        array = np.asarray(values)
        expected = (self.global_batch_size // self._num_ranks, self.seq_len + 1)
        if array.shape != expected:
            raise UserError(
                f"the loader of data rank {self._rank} yields {name} of shape {array.shape}, not {expected}: "
                "training.global_batch_size / data ranks sequences of training.seq_len + 1 tokens"
            )
        return array

    def _encoded_state(self) -> str:
        state = _encode(self._loader.state_dict())
        if not self._state:  # the first state shows whether a checkpoint can hold this loader's states
            try:
                _decode(state)
            except pickle.UnpicklingError as error:
                raise UserError(
                    "the loader's state_dict() may hold only tensors, numbers, strings, bytes, None, lists, tuples, sets and "
                    f"dicts: {error}"
                ) from None
        return state

    def _open(self, rows: range) -> None:
        """Builds the loader of these rows and restores its state before the first `iter`, which would restart it."""
        self._rows = rows
        self._rank, self._num_ranks = rows.start // len(rows), self.global_batch_size // len(rows)
        self._loader = self.build_loader(self._rank, self._num_ranks)
        if self._resumed is not None:
            _, num_ranks, state = self._resumed[min(self._rank, len(self._resumed) - 1)]
            if num_ranks != self._num_ranks:
                raise UserError(
                    f"the checkpoint holds the loader states of {num_ranks} data ranks, but this run has {self._num_ranks}; the "
                    f"states of a user's loader cannot be redistributed, so resume with {num_ranks} data ranks"
                )
            self._loader.load_state_dict(_decode(state))
        self._items = iter(self._loader)


def _encode(state: dict[str, Any]) -> str:
    """Serializes a state, which may contain tensors, as text for the checkpoint's JSON."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def _decode(text: str) -> dict[str, Any]:
    """Restores a state. `weights_only` refuses to unpickle anything but tensors and plain Python values."""
    return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
