"""Writes the token files of other programs from their published layouts."""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def write_megatron(
    prefix: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: str = "int32", **header: Any
) -> Path:
    """Writes documents, each of one or more sequences, as Megatron-LM's `prefix.bin` and `prefix.idx`. Returns the path of the
    first."""
    sequences = [sequence for document in documents for sequence in document]
    lengths = np.array([len(sequence) for sequence in sequences], "<i4")
    width = np.dtype(dtype).itemsize
    pointers = np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64)])[: len(lengths)] * width
    first_sequences = np.cumsum([0] + [len(document) for document in documents])
    values = {"magic": b"MMIDIDX\0\0", "version": 1, "code": CODES[dtype]} | header
    start = struct.pack("<9sQBQQ", *values.values(), len(sequences), len(first_sequences))
    arrays = lengths.tobytes(), pointers.astype("<i8").tobytes(), first_sequences.astype("<i8").tobytes()
    prefix.parent.mkdir(parents=True, exist_ok=True)
    prefix.with_name(f"{prefix.name}.idx").write_bytes(start + b"".join(arrays))
    data = prefix.with_name(f"{prefix.name}.bin")
    data.write_bytes(b"".join(np.array(sequence, dtype).tobytes() for sequence in sequences))
    return data


def write_llm_c(
    path: Path, tokens: Sequence[int], magic: int = 20240520, version: int = 1, count: int | None = None
) -> Path:
    """Writes tokens as llm.c (and modded-nanogpt) does: 256 int32, then uint16, or uint32 with the magic number of Llama 3."""
    header = [magic, version, len(tokens) if count is None else count, *[0] * 253]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        np.array(header, "<i4").tobytes() + np.array(tokens, "<u4" if magic == 20240801 else "<u2").tobytes()
    )
    return path


def write_nanogpt(path: Path, tokens: Sequence[int]) -> Path:
    """Writes tokens as nanoGPT does: uint16 without a header."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(np.array(tokens, "<u2").tobytes())
    return path
