"""The certificate of a run, and the TLS contexts of both ends.

The driver makes a certificate for each run. An agent does not know it before it connects: both ends
prove that they know the run's token, and the proofs cover the certificate (`slots/framing.py`).
"""

from __future__ import annotations

import datetime
import hashlib
import ssl
import tempfile
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_NAME = "trialflow driver"
_LIFETIME = datetime.timedelta(days=3650)
"""Nothing checks it: the certificate is of use only together with the run's token."""


def make_certificate() -> tuple[ssl.SSLContext, bytes]:
    """The driver's TLS context with a new certificate, and the certificate's digest."""
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
    return context, digest_of(certificate.public_bytes(serialization.Encoding.DER))


def agent_context() -> ssl.SSLContext:
    """The TLS context of an agent, which accepts any certificate: the handshake covers it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def digest_of(certificate: bytes) -> bytes:
    """The digest of a certificate in DER."""
    return hashlib.sha256(certificate).digest()
