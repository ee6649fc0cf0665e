"""A TCP proxy that can refuse and delay its connections, as a store does that is lost or slow."""

import contextlib
import socket
import threading
import time


class Proxy:
    """Forwards connections to a port on loopback, unless it is `closed`."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._closed = False
        self.delay = 0.0  # seconds, of each part of up to 64 KiB
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def closed(self) -> bool:
        """Whether connections are refused."""
        return self._closed

    @closed.setter
    def closed(self, value: bool) -> None:
        self._closed = value
        for connection in list(self._open) if value else []:
            _reset(connection)

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            if self._closed:
                _reset(client)
                continue
            server = socket.create_connection(("127.0.0.1", self._target))
            self._open |= {client, server}
            for pair in ((client, server), (server, client)):
                threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while content := source.recv(1 << 16):
                time.sleep(self.delay)
                target.sendall(content)
        for connection in (source, target):
            self._open.discard(connection)
            _reset(connection)


def _reset(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
