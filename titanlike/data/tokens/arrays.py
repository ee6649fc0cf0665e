"""Arrays of tokens. No torch."""

import hashlib
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class TokenArray(Protocol):
    """A random-access array of tokens."""

    @property
    def num_tokens(self) -> int:
        """Length of the array."""

    @property
    def fingerprint(self) -> str:
        """Hash of the tokens."""

    def read(self, starts: Numbers, length: int) -> Numbers:
        """Returns `length` tokens from each start (N, length)."""

    def loss_mask(self, starts: Numbers, length: int) -> Flags | None:
        """Returns which of these tokens are labels (N, length), or None if all are."""


class InMemoryTokens:
    """Tokens in a numpy array."""

    def __init__(self, tokens: npt.NDArray[Any]) -> None:
        self.tokens = tokens

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(np.ascontiguousarray(self.tokens).data).hexdigest()[:16]

    def read(self, starts: Numbers, length: int) -> Numbers:
        return np.stack([self.tokens[start : start + length] for start in starts.tolist()]).astype(np.int64)

    def loss_mask(self, starts: Numbers, length: int) -> Flags | None:
        return None
