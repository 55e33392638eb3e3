"""The certificate of a run, and the TLS contexts of both ends.

The driver makes a certificate for each run. An agent or a rank of another machine does not know it
before it connects. So both ends prove that they know the run's secret, and the proofs cover the
certificate (`processes/slots/framing.py`).
"""

from __future__ import annotations

import datetime
import hashlib
import select
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")

_NAME = "trialflow driver"
_LIFETIME = datetime.timedelta(days=3650)
"""Nothing checks it: the certificate is of use only together with the run's secret."""


class DriverTls(NamedTuple):
    """The driver's end of TLS: its context, and the digest of the certificate in it."""

    context: ssl.SSLContext
    digest: bytes


def make_certificate() -> DriverTls:
    """The driver's TLS context with a new certificate."""
    # Late: a run on one machine needs no certificate, and the import takes longer than the rest.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _NAME)])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + _LIFETIME)
        .sign(key, hashes.SHA256())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.TemporaryDirectory(prefix="trialflow-tls-") as folder:  # readable by us alone
        path = Path(folder) / "driver.pem"
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
            + certificate.public_bytes(serialization.Encoding.PEM)
        )
        context.load_cert_chain(path)
    return DriverTls(context, digest_of(certificate.public_bytes(serialization.Encoding.DER)))


def client_context() -> ssl.SSLContext:
    """The TLS context of the other end; it accepts any certificate, as the handshake covers it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


class TlsSocket:
    """A connected socket with TLS, which one thread may read while another writes.

    `ssl` does not promise that, and may let a writer wait for a reader. So both try under a lock,
    without waiting, and wait for the plain socket without the lock. That is taken over; its timeout
    holds for the TLS handshake. Every method raises OSError if the other end does not speak TLS, or
    is gone.
    """

    def __init__(self, plain: socket.socket) -> None:
        self._lock = threading.Lock()
        self._timeout_seconds: float | None = None
        self._socket = client_context().wrap_socket(plain)
        self._socket.setblocking(False)
        # That of the other end.
        self.certificate = digest_of(self._socket.getpeercert(binary_form=True) or b"")

    def settimeout(self, seconds: float | None) -> None:
        self._timeout_seconds = seconds

    def recv(self, count: int) -> bytes:
        """At most `count` bytes; none if the other end has closed the connection."""
        return self._when_ready(lambda: self._socket.recv(count))

    def sendall(self, data: bytes) -> None:
        """Only one thread at a time."""
        left = memoryview(data)
        while left:
            left = left[self._when_ready(partial(self._socket.send, left)) :]

    def shutdown(self, how: int) -> None:
        """End the connection; other threads get an error or an end."""
        socket.socket.shutdown(self._socket, how)  # not `ssl`'s, which others may be using

    def close(self) -> None:
        self._socket.close()

    def _when_ready(self, attempt: Callable[[], T]) -> T:
        while True:
            try:
                with self._lock:
                    return attempt()
            except ssl.SSLWantReadError:
                event = select.POLLIN
            except ssl.SSLWantWriteError:
                event = select.POLLOUT
            poll = select.poll()
            poll.register(self._socket, event)
            seconds = self._timeout_seconds
            if not poll.poll(None if seconds is None else seconds * 1000):
                raise TimeoutError(f"no answer within {seconds:g} s")


def digest_of(certificate: bytes) -> bytes:
    return hashlib.sha256(certificate).digest()
