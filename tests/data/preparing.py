"""Helpers of the tests of `titanlike data prepare`."""

import json
import random
from pathlib import Path

import numpy as np

from titanlike.config.sections import Tokenizer as Section

BYTES = Section()
MANY = 40  # lower bound of the number of work units in the test corpus, with `small_units`


def random_text(rng: random.Random, num_words: int) -> str:
    return " ".join("".join(rng.choices("abcdeé", k=rng.randint(1, 9))) for _ in range(num_words))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def read_split(out: Path, split: str) -> list[list[int]]:
    """Reads the documents of a split as the documentation of the format describes."""
    found = []
    manifest = json.loads((out / "manifest.json").read_text())
    for shard in manifest["splits"][split]:
        tokens = np.fromfile(out / f"{shard['name']}.tokens", "<u2" if manifest["dtype"] == "uint16" else "<u4")
        ends = np.fromfile(out / f"{shard['name']}.documents", "<i8").reshape(-1, 2)[:, 0]
        found += [document.tolist() for document in np.split(tokens, ends)[:-1]]
    return found
