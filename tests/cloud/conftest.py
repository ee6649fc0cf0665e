"""Fixtures for AWS on loopback, with an empty account for each test."""

import logging
from collections.abc import Iterator

import pytest
from moto.sagemaker.responses import SageMakerResponse
from moto.server import ThreadedMotoServer

from tests.cloud.aws import REGION, Aws, stop_training_job
from titanlike.tools.clusters.sagemaker.service import Clients, make_clients

# Variables that could select another account.
UNSET = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_REGION", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3")
VARIABLES = {
    "AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null", "AWS_ACCESS_KEY_ID": "nobody",
    "AWS_SECRET_ACCESS_KEY": "nothing", "AWS_DEFAULT_REGION": REGION, "AWS_EC2_METADATA_DISABLED": "true",
    "NO_PROXY": "127.0.0.1",
}  # fmt: skip


def set_environment(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Sets all environment variables that concern AWS."""
    for name in UNSET:
        monkeypatch.delenv(name, raising=False)
    for name, value in (VARIABLES | {"AWS_ENDPOINT_URL": address}).items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The URL of moto's server."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    yield f"http://{host}:{port}"
    moto.stop()


@pytest.fixture(scope="session")
def session_clients(server: str) -> Iterator[Clients]:
    """Clients shared by all tests: creating them takes longer than most tests."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        set_environment(monkeypatch, server)
        made = make_clients()
    yield made
    for client in (made.sagemaker, made.s3):
        client.close()


@pytest.fixture
def account(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets credentials, a region and the server's URL in the environment."""
    set_environment(monkeypatch, server)


@pytest.fixture
def aws(server: str, account: None, session_clients: Clients, monkeypatch: pytest.MonkeyPatch) -> Iterator[Aws]:
    """The simulated account, and clients for it."""
    monkeypatch.setattr(SageMakerResponse, "stop_training_job", stop_training_job, raising=False)
    Aws.clear(server)  # jobs of tests without this fixture
    simulated = Aws(server, session_clients)
    yield simulated
    simulated.reset()
