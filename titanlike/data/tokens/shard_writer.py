"""Writes token shards. No torch."""

import hashlib
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from titanlike.data.tokens.shards import Shard
from titanlike.utils.atomic_write import atomic_writer, write_all


class ShardWriter:
    """Writes one shard. Its files have temporary names until `close`."""

    BUFFER = 2**20  # tokens

    def __init__(self, folder: Path, name: str, dtype: "npt.DTypeLike") -> None:
        self.name = name
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.num_tokens = self.num_documents = self.prompt_tokens = 0
        self._pending: list[npt.NDArray[Any]] = []
        self._num_pending = 0
        self._documents: list[int] = []  # end and first label of each document, in turn
        self._first_label: int | None = None  # of an unfinished document
        self._open = ExitStack()
        self._files = {
            kind: self._open.enter_context(atomic_writer(folder / f"{name}.{kind}")) for kind in ("tokens", "documents")
        }
        self._hashes = {kind: hashlib.sha256() for kind in self._files}

    def add(self, tokens: npt.NDArray[Any], prompt_tokens: int = 0, *, last: bool = True) -> None:
        """Appends a document, or with `last=False` a part of one. Its first `prompt_tokens` are excluded from the loss."""
        if self._first_label is None:
            self._first_label = self.num_tokens + prompt_tokens
        self._pending.append(tokens)
        self._num_pending += len(tokens)
        self.num_tokens += len(tokens)
        self.prompt_tokens += prompt_tokens
        if last:
            self._documents += [self.num_tokens, self._first_label]
            self._first_label = None
            self.num_documents += 1
        if self._num_pending >= self.BUFFER:
            self._flush()

    def close(self) -> Shard:
        """Renames the files and returns the shard's entry in the manifest."""
        assert self._first_label is None
        self._flush()
        self._open.close()
        tokens_sha256, documents_sha256 = (self._hashes[kind].hexdigest() for kind in ("tokens", "documents"))
        return Shard(
            self.name, self.num_tokens, self.num_documents, tokens_sha256, documents_sha256, self.prompt_tokens
        )

    def drop(self) -> None:
        """Deletes the unfinished files."""
        for file in self._files.values():
            with suppress(OSError):  # the disk may be full
                file.close()
            Path(file.name).unlink(missing_ok=True)

    def _flush(self) -> None:
        self._write("tokens", np.concatenate([*self._pending, np.empty(0, self.dtype)]).astype(self.dtype))
        self._write("documents", np.array(self._documents, "<i8"))
        self._pending, self._documents, self._num_pending = [], [], 0

    def _write(self, kind: str, values: npt.NDArray[Any]) -> None:
        content = values.tobytes()
        write_all(self._files[kind], content)
        self._hashes[kind].update(content)
