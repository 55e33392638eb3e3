"""A network connection to a server on this machine, which a test can cut and mend."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress


class Wire:
    """Forwards connections to a port of 127.0.0.1. While it is cut, they are refused.

    A context manager.

    Attributes:
        port: where it listens; the same after it was mended.
    """

    def __init__(self, to_port: int) -> None:
        self._to_port = to_port
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._timers: list[threading.Timer] = []
        self.port = 0

    def __enter__(self) -> Wire:
        self.mend()
        return self

    def __exit__(self, *exception: object) -> None:
        for timer in self._timers:
            timer.join()
        self.cut()
        for thread in self._threads:
            thread.join()

    def cut(self) -> None:
        """End all connections, and refuse new ones."""
        with self._lock:
            for each in self._sockets:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()
            self._sockets.clear()

    def mend(self) -> None:
        """Accept connections again."""
        listener = socket.create_server(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        with self._lock:
            self._sockets.append(listener)
        self._start(self._accept, listener)

    def mend_in(self, seconds: float) -> None:
        """Accept connections again after a while."""
        self._timers.append(threading.Timer(seconds, self.mend))
        self._timers[-1].start()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # it is cut
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", self._to_port))
                with self._lock:
                    self._sockets += [near, far]
                self._start(self._pump, near, far)
                self._start(self._pump, far, near)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def _start(self, work: Callable[..., None], *arguments: socket.socket) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()
