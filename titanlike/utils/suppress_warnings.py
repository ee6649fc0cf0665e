"""Suppression of torchao's import-time warnings about kernels that this platform cannot load."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def suppress_import_warnings() -> Iterator[None]:
    """Raises the log level of torchao and of torch's pytree module to ERROR."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    previous_levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, previous_levels, strict=True):
            logger.setLevel(level)
