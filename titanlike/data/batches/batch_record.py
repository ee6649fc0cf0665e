"""Records the sequences that each rank reads, for `titanlike verify`, which compares the batches of two layouts."""

import os
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


def record_batch(path: Path, step: int, data_rank: int, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Appends the hashes of full sequences (N, T) of tokens and labels to the file of this process.

    The name of `path` is the kind of data, `training` or `validation`.
    """
    rows = zip(arrays["tokens"].astype(np.int64), arrays["labels"].astype(np.int64), strict=True)
    hashes = [blake2b(tokens.tobytes() + labels.tobytes(), digest_size=8).hexdigest() for tokens, labels in rows]
    with path.with_name(f"{path.name}.{os.getpid()}").open("a") as out:
        print(step, data_rank, *hashes, file=out)
