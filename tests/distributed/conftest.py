"""A fixture that compares layouts with one process."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.parity import Parity
from tests.pool import Ranks


@pytest.fixture(scope="module")
def parity(ranks: Ranks, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parity]:
    """Compares with one process, and writes what was measured to the path of `--record`."""
    compared = Parity(ranks, tmp_path_factory.mktemp("parity"))
    yield compared
    if path := request.config.getoption("--record"):
        recorded = {"torch": torch.__version__, "cases": compared.measured}
        Path(path).write_text(json.dumps(recorded, indent=1) + "\n")
