"""A web server on this machine: files from memory, with ranges, that can vanish or fail while they are read."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Web:
    """What the server has, and what it was asked for."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.address = ""
        self.asked: list[tuple[str, str]] = []  # path and range
        self.ranges = True  # as most servers
        self.failures = 0  # so many answers to come are failures


@contextmanager
def web() -> Iterator[Web]:
    served = Web()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 2**16  # head and body together: apart, the one waits for the other's receipt

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, body: bool) -> None:
            path, wanted = self.path.lstrip("/"), self.headers.get("Range", "") if served.ranges else ""
            served.asked.append((path, wanted if body else "HEAD"))
            if served.failures and body:
                served.failures -= 1
                self._say(500, b"", body)
            elif path not in served.files:
                self._say(404, b"", body)
            elif match := re.fullmatch(r"bytes=(\d+)-(\d*)", wanted):
                content = served.files[path]
                first, last = int(match[1]), min(int(match[2] or len(content)), len(content) - 1)
                if first > last:
                    self._say(416, b"", body)
                else:
                    place = f"bytes {first}-{last}/{len(content)}"
                    self._say(206, content[first : last + 1], body, {"Content-Range": place})
            else:
                self._say(200, served.files[path], body)

        def _say(self, code: int, content: bytes, body: bool, more: dict[str, str] | None = None) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(content)))
            if served.ranges:
                self.send_header("Accept-Ranges", "bytes")
            for name, value in (more or {}).items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
