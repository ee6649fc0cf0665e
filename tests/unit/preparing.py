"""What the tests of `titanlike data prepare` share."""

import json
import random
from pathlib import Path

import numpy as np

from titanlike.config.sections import Tokenizer as Section

BYTES = Section()
MANY = 40  # units of the corpus below, made small


def words(chance: random.Random, count: int) -> str:
    return " ".join("".join(chance.choices("abcdeé", k=chance.randint(1, 9))) for _ in range(count))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def document_ids_and_positions(out: Path, split: str) -> list[list[int]]:
    """The documents of a split, read by the format's own definition."""
    found = []
    manifest = json.loads((out / "manifest.json").read_text())
    for shard in manifest["splits"][split]:
        tokens = np.fromfile(out / f"{shard['name']}.tokens", "<u2" if manifest["dtype"] == "uint16" else "<u4")
        ends = np.fromfile(out / f"{shard['name']}.documents", "<i8").reshape(-1, 2)[:, 0]
        found += [part.tolist() for part in np.split(tokens, ends)[:-1]]
    return found
