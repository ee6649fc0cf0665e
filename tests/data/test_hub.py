"""Recipes that stream from the Hugging Face Hub, with a local server in its place."""

import gzip
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.launching import ROOT, python


def jsonl(name: str) -> bytes:
    return gzip.compress("".join(json.dumps({"text": f"{name} {n} " * 40}) + "\n" for n in range(200)).encode())


FILES = {
    "allenai/c4": {
        **{f"en/c4-train.{n:05}-of-01024.json.gz": jsonl(f"train{n}") for n in range(2)},
        "en/c4-validation.00000-of-00008.json.gz": jsonl("validation"),
        "realnewslike/c4-train.00000-of-00512.json.gz": jsonl("other"),
    },
}


class Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, _, query = unquote(self.path).partition("?")
        if match := re.fullmatch(r"/api/datasets/(\w+/[\w-]+)(?:/revision/main)?", path):
            self._send(json.dumps({"id": match[1], "sha": "0", "siblings": []}).encode())
        elif match := re.fullmatch(r"/api/datasets/(\w+/[\w-]+)/tree/main/?(.*)", path):
            self._send(json.dumps(self._entries(match[1], match[2], "recursive=true" in query)).encode())
        elif match := re.fullmatch(r"/datasets/(\w+/[\w-]+)/resolve/main/(.*)", path):
            content = FILES[match[1]][match[2]]
            if requested := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                first, last = int(requested[1]), min(int(requested[2] or len(content)), len(content) - 1)
                content_range = f"bytes {first}-{last}/{len(content)}"
                self._send(content[first : last + 1], 206, {"Content-Range": content_range, "ETag": '"0"'})
            else:
                self._send(content, 200, {"ETag": '"0"'})
        else:
            self._send(b"{}", 404)

    def _entries(self, repository: str, folder: str, recursive: bool) -> list[dict[str, object]]:
        found: dict[str, dict[str, object]] = {}
        for name, content in FILES.get(repository, {}).items():
            if folder and not name.startswith(f"{folder}/"):
                continue
            parts = name[len(folder) :].strip("/").split("/")
            if len(parts) > 1 and not recursive:
                path = f"{folder}/{parts[0]}".strip("/")
                found[path] = {"type": "directory", "path": path, "oid": "0", "size": 0}
            else:
                found[name] = {"type": "file", "path": name, "oid": "0", "size": len(content)}
        return list(found.values())

    def _send(self, content: bytes, code: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def inspect(hub: str, folder: Path, *arguments: str) -> str:
    variables = {"HF_ENDPOINT": hub, "HF_HOME": str(folder), "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = ("-m", "titanlike.tools.cli.main", "data", "inspect", *arguments, "--tokenizer.encoding=bytes")
    done = python(ROOT, *command, variables=variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_c4_recipe_streams_and_validates(hub: str, tmp_path: Path) -> None:
    arguments = ("train_configs/gpt2_124m_c4.toml", "--rank=1", "--ranks=2", "--training.seq_len=64")
    shown = inspect(hub, tmp_path, *arguments, "--sequences=300")
    assert "data    stream: 2 files" in shown
    assert set(re.findall(r"(train\d|validation|other)", shown.partition("sequence")[2])) == {
        "train1"
    }  # this rank's file
    assert re.search(r"validation \d+ validation \d+", inspect(hub, tmp_path, *arguments, "--validation"))
