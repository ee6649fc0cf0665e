"""Values that a checkpointed function reads on the host, kept for its recomputation in the backward pass."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
KEEPS = "keeps_for_recomputation"  # attribute of modules that call `keep_for_recomputation`
_local = threading.local()  # the backward pass of a GPU runs in a thread of its own


def keep_for_recomputation(compute: Callable[[], T]) -> T:
    """Returns the result of `compute` or, in the recomputation of a function that is checkpointed with `keeping_contexts`, that
    of the forward pass: a collective and a synchronization with the host are not repeated."""
    next_value: Callable[[Callable[[], Any]], Any] | None = getattr(_local, "next_value", None)
    value: T = compute() if next_value is None else next_value(compute)
    return value


class _Context:
    """Can be entered again after it has been left: a schedule that splits the backward pass recomputes twice."""

    def __init__(self, values: list[Any], recomputes: bool) -> None:
        self.values, self.recomputes = values, recomputes

    def __enter__(self) -> None:
        kept = iter(self.values)
        _local.next_value = (lambda _: next(kept)) if self.recomputes else self._append

    def __exit__(self, *error: object) -> None:  # also if checkpoint stops a recomputation early
        _local.next_value = None

    def _append(self, compute: Callable[[], Any]) -> Any:
        self.values.append(compute())
        return self.values[-1]


def keeping_contexts() -> tuple[Any, Any]:
    """Returns the contexts of a forward pass and of its recomputation: a `context_fn` of `torch.utils.checkpoint.checkpoint`."""
    values: list[Any] = []
    return _Context(values, recomputes=False), _Context(values, recomputes=True)
