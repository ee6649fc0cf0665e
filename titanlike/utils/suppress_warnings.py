"""Importing torchao without what it tells of kernels for other machines that it cannot load here."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def suppress_import_warnings() -> Iterator[None]:
    """Only errors, while this lasts."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
