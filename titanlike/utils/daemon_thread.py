"""Daemon threads whose result, or exception, another thread waits for."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def start_daemon_thread(name: str, function: Callable[[], T]) -> Future[T]:
    """Calls a function in a daemon thread: the process must be able to exit while the thread waits for a dead rank."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001  raised in the thread that waits
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
