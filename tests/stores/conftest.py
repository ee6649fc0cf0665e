"""Object stores on loopback: moto's S3, and the emulators of Google Cloud Storage and Azure Blob Storage."""

import contextlib
import itertools
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pytest
from moto.server import ThreadedMotoServer

from tests.faults.conftest import _kill_remaining_processes, starter, undisturbed  # noqa: F401  fixtures
from tests.forkserver import ROOT
from tests.launching import free_port
from tests.stores.proxy import Proxy

# Azurite's account and key, which its documentation publishes.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

NUMBERS = itertools.count()  # of buckets


@dataclass(frozen=True)
class Bucket:
    """An empty bucket, with the environment variables that give access to it."""

    url: str
    files: Any  # fsspec's file system
    root: str
    proxy: Proxy

    def names(self, folder: str) -> set[str]:
        """The objects below a folder."""
        self.files.invalidate_cache()
        prefix = f"{self.root}/{folder}/"
        return {path.removeprefix(prefix) for path in self.files.find(prefix)}

    def download(self, folder: str, to: Path) -> None:
        """Copies the objects below a folder."""
        for name in self.names(folder):
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            (to / name).write_bytes(self.files.cat_file(f"{self.root}/{folder}/{name}"))


@contextlib.contextmanager
def listening(command: list[str], port: str) -> Iterator[None]:
    """Runs a server until the block ends."""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        end = time.monotonic() + 60
        while True:
            assert server.poll() is None and time.monotonic() < end, f"{command} does not listen"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", int(port)), timeout=1):
                break
            time.sleep(0.1)
        yield
        server.terminate()


@contextlib.contextmanager
def s3() -> Iterator[int]:
    """Runs moto's server. Returns its port."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    yield moto.get_host_and_port()[1]
    moto.stop()


@contextlib.contextmanager
def gs() -> Iterator[int]:
    """Runs the emulator of Google Cloud Storage. Returns its port."""
    port = free_port()
    with listening([sys.executable, "-m", "tests.stores.gcs_server", port], port):
        yield int(port)


@contextlib.contextmanager
def az() -> Iterator[int]:
    """Runs Azurite, which npm has installed in the folder `NODE_MODULES`. Returns its port."""
    port = free_port()
    options = ["--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    program = f"{os.environ['NODE_MODULES']}/.bin/azurite-blob"
    with listening([program, *options, "--blobHost", "127.0.0.1", "--blobPort", port], port):
        yield int(port)


def variables(port: int) -> dict[str, str]:
    """Returns the environment variables of the clients of all stores."""
    account = f"AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint=http://127.0.0.1:{port}/{ACCOUNT};"
    return {
        "AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null", "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing", "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        # The emulator has no credentials, and no gRPC, with which gcsfs asks for the kind of a bucket.
        "FSSPEC_GS_TOKEN": "anon", "NO_GCE_CHECK": "true", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}",
        "AZURE_STORAGE_CONNECTION_STRING": f"DefaultEndpointsProtocol=http;{account}",
    }  # fmt: skip


@pytest.fixture(scope="session", params=[s3, gs, az], ids=lambda serve: serve.__name__)
def store(request: pytest.FixtureRequest) -> Iterator[tuple[str, Proxy]]:
    """The protocol of a store, and the proxy through which clients reach it."""
    with request.param() as port:
        yield request.param.__name__, Proxy(port)


@pytest.fixture
def bucket(store: tuple[str, Proxy], monkeypatch: pytest.MonkeyPatch) -> Bucket:
    protocol, proxy = store
    for name, value in variables(proxy.port).items():
        monkeypatch.setenv(name, value)
    fsspec.config.set_conf_env(fsspec.config.conf)  # read once, when fsspec is imported
    url = f"{protocol}://bucket-{next(NUMBERS)}"
    files, root = fsspec.core.url_to_fs(url)
    files.mkdir(root)
    return Bucket(url, files, root, proxy)
