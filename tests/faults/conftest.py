"""Fixtures of the fault tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.starting import Starter
from tests.faults.undisturbed import Trained, trained


@pytest.fixture(scope="session")
def starter() -> Starter:
    """Starts jobs."""
    return Starter()


@pytest.fixture(autouse=True)
def _kill_remaining_processes(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "starter" in request.fixturenames:
        request.getfixturevalue("starter").kill_jobs()


@pytest.fixture(scope="session")
def undisturbed(starter: Starter, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run without faults, with all its checkpoints: of steps 2, 4 and 6."""
    folder: Path = tmp_path_factory.mktemp("undisturbed")
    job = starter.start(folder, **{"checkpoint.mode": "sync"})
    assert job.wait() == [0, 0], job.output
    return trained(folder)
