"""An OTLP receiver that reads requests and keeps nothing. GET returns their number."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def receiving() -> Iterator[str]:
    """Run a receiver in another process during the block. Yields its address."""
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.otlp_receiver"], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process.stdout.readline().strip() if process.stdout else ""
        finally:
            process.kill()


class CountingHandler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    protocol_version = "HTTP/1.1"
    requests = 0

    def do_POST(self) -> None:
        """Read and count an exporter's request."""
        self.rfile.read(int(self.headers["Content-Length"]))
        CountingHandler.requests += 1
        self._answer(b"")

    def do_GET(self) -> None:
        """Return the number of requests so far."""
        self._answer(str(CountingHandler.requests).encode())

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


if __name__ == "__main__":
    with ThreadingHTTPServer(("127.0.0.1", 0), CountingHandler) as server:
        print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
        server.serve_forever()
