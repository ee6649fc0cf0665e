"""AWS on loopback, empty for each test."""

import logging
from collections.abc import Iterator

import pytest
from moto.sagemaker.responses import SageMakerResponse
from moto.server import ThreadedMotoServer
from service import Clients, make_clients

from tests.cloud.aws import REGION, Aws, stop_training_job

# What of the user's own could lead elsewhere.
OTHERS = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_REGION", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3")
OURS = {
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    "AWS_ACCESS_KEY_ID": "nobody",
    "AWS_SECRET_ACCESS_KEY": "nothing",
    "AWS_DEFAULT_REGION": REGION,
    "AWS_EC2_METADATA_DISABLED": "true",
    "NO_PROXY": "127.0.0.1",
}


def enter(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Take all of the environment that has to do with AWS."""
    for name in OTHERS:
        monkeypatch.delenv(name, raising=False)
    for name, value in (OURS | {"AWS_ENDPOINT_URL": address}).items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The address of the server."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    yield f"http://{host}:{port}"
    moto.stop()


@pytest.fixture(scope="session")
def session_clients(server: str) -> Iterator[Clients]:
    """Made once: that takes longer than most tests."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        enter(monkeypatch, server)
        made = clients()
    yield made
    for client in (made.sagemaker, made.logs, made.s3):
        client.close()


@pytest.fixture
def account(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials, a region and the address of the server, in the environment."""
    enter(monkeypatch, server)


@pytest.fixture
def aws(server: str, account: None, session_clients: Clients, monkeypatch: pytest.MonkeyPatch) -> Iterator[Aws]:
    """AWS, and clients of it."""
    monkeypatch.setattr(SageMakerResponse, "stop_training_job", stop_training_job, raising=False)
    Aws.forget(server)  # what tests without this fixture have sent
    there = Aws(server, session_clients)
    yield there
    there.reset()
