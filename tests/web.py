"""A local web server that serves files from memory, with range requests and injected failures."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Web:
    """The files of the server, and the requests it has received."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.address = ""
        self.asked: list[tuple[str, str]] = []  # path and range
        self.ranges = True  # supports range requests
        self.failures = 0  # number of GET requests that will fail
        self.authorization: set[str] = set()  # headers received


@contextmanager
def web() -> Iterator[Web]:
    served = Web()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = (
            2**16
        )  # header and body in one packet: otherwise the body waits for the acknowledgement of the header

        def do_HEAD(self) -> None:
            self._respond(body=False)

        def do_GET(self) -> None:
            self._respond(body=True)

        def _respond(self, body: bool) -> None:
            path = self.path.lstrip("/").partition("?")[0]
            requested = self.headers.get("Range", "") if served.ranges else ""
            served.authorization.add(self.headers.get("Authorization", ""))
            served.asked.append((path, requested if body else "HEAD"))
            if served.failures and body:
                served.failures -= 1
                self._send(500, b"", body)
            elif path not in served.files:
                self._send(404, b"", body)
            elif match := re.fullmatch(r"bytes=(\d+)-(\d*)", requested):
                content = served.files[path]
                first, last = int(match[1]), min(int(match[2] or len(content)), len(content) - 1)
                if first > last:
                    self._send(416, b"", body)
                else:
                    content_range = f"bytes {first}-{last}/{len(content)}"
                    self._send(206, content[first : last + 1], body, {"Content-Range": content_range})
            else:
                self._send(200, served.files[path], body)

        def _send(self, code: int, content: bytes, body: bool, headers: dict[str, str] | None = None) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(content)))
            if served.ranges:
                self.send_header("Accept-Ranges", "bytes")
            for name, value in (headers or {}).items():
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
