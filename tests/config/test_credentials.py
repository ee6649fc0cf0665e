"""Credentials in an address are refused before anything is written, and not printed."""

import base64
from pathlib import Path

import pytest

from tests.launching import SMALL, run
from tests.web import web
from titanlike.config import UserError
from titanlike.config.base import CREDENTIALS, refuse_credentials
from titanlike.data.documents.listing import list_files
from titanlike.data.documents.remote import file_system
from titanlike.recipe import PretrainRecipe, load

SECRET = "S3CRET"


@pytest.mark.parametrize(
    "address",
    [
        f"s3://KEY:{SECRET}@bucket/runs", f"s3://KEY:{SECRET}/with/slashes+@bucket/runs", f"https://user:{SECRET}@host/file",
        f"https://{SECRET}@host/file", f"http://:{SECRET}@host:8080/file", f"ftp://user:{SECRET}@host/file",
        f"simplecache::sftp://user:{SECRET}@host/file",
    ],
)  # fmt: skip
def test_credentials_are_refused_and_masked(tmp_path: Path, address: str) -> None:
    (tmp_path / "r.toml").write_text(f"[data]\nmixture = ['a', '{address}']\n")
    (tmp_path / "empty.toml").write_text("")
    for attempt in (
        lambda: load(PretrainRecipe, tmp_path / "r.toml"),
        lambda: load(PretrainRecipe, tmp_path / "empty.toml", {"checkpoint.dir": address}),
        lambda: load(PretrainRecipe, tmp_path / "empty.toml", {"run.name": address}),
        lambda: load(PretrainRecipe, tmp_path / "empty.toml", {"nothing": address}),
        lambda: list_files(address),
    ):
        with pytest.raises(UserError, match=r"://\*\*\*@.* contains credentials, which would be written") as error:
            attempt()
        assert SECRET not in str(error.value)


@pytest.mark.parametrize(
    "address",
    [
        "s3://bucket/a:b@c", "https://host:8080/path/x@y.txt", "hf://datasets/owner/name@main/x.json", "runs", "a@b:c",
        "sftp://user@host/file", "http://host/{0..9}.txt?at=12:30@noon",
    ],
)  # fmt: skip
def test_other_addresses_are_accepted(address: str) -> None:
    refuse_credentials("data.path", address)
    assert not CREDENTIALS.search(address)


def test_no_file_and_no_output_has_the_credentials(tmp_path: Path) -> None:
    done = run(tmp_path, **SMALL | {"checkpoint.dir": f"s3://KEY:{SECRET}@bucket/runs"})
    assert done.returncode == 2
    assert "checkpoint.dir = 's3://***@bucket/runs' contains credentials" in done.stderr
    assert SECRET not in done.stdout + done.stderr
    assert not list(tmp_path.iterdir())


def test_a_web_server_gets_the_login_in_netrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".netrc").write_text(f"machine 127.0.0.1 login user password {SECRET}\n")
    (tmp_path / ".netrc").chmod(0o600)
    with web() as site:
        site.files["a.txt"] = b"text"
        files, path = file_system(f"{site.address}/a.txt")
        assert files.cat_file(path) == b"text"
        assert site.authorization == {"Basic " + base64.b64encode(f"user:{SECRET}".encode()).decode()}
