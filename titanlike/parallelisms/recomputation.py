"""Values that a checkpointed function reads on the host, kept for its recomputation in the backward pass."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

T = TypeVar("T")
KEEPS = "keeps_for_recomputation"  # attribute of modules that call `keep_for_recomputation`
_local = threading.local()  # the backward pass of a GPU runs in a thread of its own


def keep_for_recomputation(compute: Callable[[], T]) -> T:
    """Returns the result of `compute` or, in the recomputation of a function that is checkpointed with `keeping_contexts`, the
    result of the forward pass: a collective and a synchronization with the host are not repeated."""
    next_value: Callable[[Callable[[], Any]], Any] | None = getattr(_local, "next_value", None)
    value: T = compute() if next_value is None else next_value(compute)
    return value


class _Context:
    """Can be entered again after it has been left: a schedule that splits the backward pass recomputes twice."""

    def __init__(self, values: list[Any], recomputes: bool, inner: AbstractContextManager[Any]) -> None:
        self.values, self.recomputes, self.inner = values, recomputes, inner

    def __enter__(self) -> None:
        kept = iter(self.values)
        _local.next_value = (lambda _: next(kept)) if self.recomputes else self._append
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> None:  # also if checkpoint stops a recomputation early
        self.inner.__exit__(*error)
        _local.next_value = None

    def _append(self, compute: Callable[[], Any]) -> Any:
        # Outside of selective checkpointing, which numbers the calls of each operator: the recomputation has none of these.
        self.inner.__exit__(None, None, None)
        try:
            self.values.append(compute())
        finally:
            self.inner.__enter__()
        return self.values[-1]


def keeping_contexts(selective: Callable[[], tuple[Any, Any]] | None = None) -> tuple[Any, Any]:
    """Returns the contexts of a forward pass and of its recomputation: a `context_fn` of `torch.utils.checkpoint.checkpoint`.

    Args:
        selective: the `context_fn` of selective checkpointing, to use both.
    """
    values: list[Any] = []
    forward, recomputation = selective() if selective else (nullcontext(), nullcontext())
    return _Context(values, False, forward), _Context(values, True, recomputation)
