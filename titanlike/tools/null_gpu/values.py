"""Comparisons of values and times by tests and benchmarks of a GPU: they run on a null GPU, too, and do not have to hold there."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager


def on_null_gpu() -> bool:
    """Returns whether this process runs on null GPUs."""
    return hasattr(ctypes.CDLL(None), "null_gpu_set_callback")


@contextmanager
def compare_values() -> Iterator[None]:
    """Encloses assertions about values or times. On a null GPU, one that fails is ignored."""
    try:
        yield
    except AssertionError:
        if not on_null_gpu():
            raise
