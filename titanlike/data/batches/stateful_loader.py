"""A user's own dataset, read with torchdata's StatefulDataLoader or any other loader with a state."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torchdata.nodes import Stateful

from titanlike.config import UserError
from titanlike.data.batches.packed_dataset import Position, SequenceBatch
from titanlike.utils.json_values import from_json, to_json


class StatefulLoader(Stateful, Protocol):
    """An iterable with `state_dict` and `load_state_dict`, such as `StatefulDataLoader` or `torchdata.nodes.Loader`."""

    def __iter__(self) -> Iterator[Any]: ...


class StatefulLoaderSource:
    """A `BatchSource` that reads one loader per data-parallel rank and keeps the state of each in the checkpoint.

    `build_loader(data_rank, num_data_ranks, epoch)` returns the loader of a rank, once per epoch. An item holds the rows of the
    rank for one step: global batch size / data-parallel ranks sequences of `seq_len` + 1 token ids, as a tensor or array
    (N, T + 1), or a dict of such `tokens` and, of the same shape, a `loss_mask`, True where a token is a label, and
    `document_ids`, which mask attention between documents. Both are optional. `fingerprint` identifies the data; change it
    whenever they change.
    """

    def __init__(
        self,
        build_loader: Callable[[int, int, int], StatefulLoader],
        *,
        seq_len: int,
        global_batch_size: int,
        fingerprint: str,
    ) -> None:
        self.fingerprint = fingerprint
        self.build_loader = build_loader
        self.seq_len = seq_len
        self.global_batch_size = global_batch_size
        self._resumed: Position = []
        self._position: Position = []
        self._items: Iterator[tuple[Any, Position]] | None = None

    def describe(self, steps: int) -> str:
        return f"{steps * self.global_batch_size:,} sequences of a user's loader"

    def load_position(self, position: Position | None) -> None:
        self._resumed, self._items = position or [], None

    def position(self) -> Position:
        """Returns the rank, the number of ranks, the epoch and the state of the loader, which is empty at an epoch's start."""
        return self._position

    def read(self, step: int, rows: range) -> SequenceBatch:
        """Returns the next item of the loader. Steps must be read in order."""
        if self._items is None:
            self._items = self._read_epochs(rows.start // len(rows), self.global_batch_size // len(rows))
        item, self._position = next(self._items)
        arrays = item if isinstance(item, dict) else {"tokens": item}
        tokens = self._to_numpy("tokens", arrays["tokens"], len(rows)).astype(np.int64)
        loss_mask = document_ids = None
        if "loss_mask" in arrays:
            loss_mask = self._to_numpy("loss_mask", arrays["loss_mask"], len(rows)).astype(bool)
        if "document_ids" in arrays:
            document_ids = self._to_numpy("document_ids", arrays["document_ids"], len(rows)).astype(np.int64)
        sequence_ids = np.array(rows, np.int64) + (step - 1) * self.global_batch_size
        return SequenceBatch(sequence_ids, tokens, loss_mask, document_ids)

    def _read_epochs(self, rank: int, num_ranks: int) -> Iterator[tuple[Any, Position]]:
        """Yields the items of all epochs, each with the position after it.

        Every epoch has a new loader, and the state after its last item is never used: torchdata 0.11 neither restores the
        generator of a shuffle for later epochs nor resumes every loader that is exhausted."""
        epoch, state = 0, None
        if self._resumed:
            _, num_saved, epoch, state = self._resumed[min(rank, len(self._resumed) - 1)]
            if num_saved != num_ranks:
                raise UserError(
                    f"the checkpoint holds the loader states of {num_saved} data-parallel ranks, but this run has {num_ranks}; "
                    f"they cannot be redistributed, so resume with {num_saved} data-parallel ranks"
                )
        while True:
            loader = self.build_loader(rank, num_ranks, epoch)
            if state:
                loader.load_state_dict(from_json(state))  # before `iter`, which would start from the first item
            items = iter(loader)
            item = next(items, None)
            if item is None:
                raise UserError(f"the loader of data-parallel rank {rank} yields no items in epoch {epoch}")
            while item is not None:
                state = _to_json(loader.state_dict())
                following = next(items, None)
                if following is None:
                    epoch, state = epoch + 1, None
                yield item, [[rank, num_ranks, epoch, state]]
                item = following

    def _to_numpy(self, name: str, values: Any, num_rows: int) -> npt.NDArray[Any]:
        array, expected = np.asarray(values), (num_rows, self.seq_len + 1)
        if array.shape != expected:
            raise UserError(
                f"the loader yields {name} of shape {array.shape}, not {expected}: training.global_batch_size / data-parallel "
                "ranks sequences of training.seq_len + 1 tokens"
            )
        return array


def _to_json(state: Any) -> Any:
    try:
        return to_json(state)
    except TypeError as error:
        raise UserError(
            "a loader's state_dict() may hold only tensors, numbers, strings, bytes, None, lists, tuples and dicts, not "
            f"{error}"
        ) from None
