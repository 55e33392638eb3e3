"""Translates the errors of all storages into `StorageError`, with the cause and a remedy.

Messages and tracebacks hold no credentials, though a URL, an option or a server's reply may.
`retry_storage` repeats work after such an error.
"""

from __future__ import annotations

import errno
import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from trial_core.checkpoint.storage.credentials import secrets_in, without_credentials
from trial_core.errors import StorageError

T = TypeVar("T")

_logger = logging.getLogger(__name__)

TRIES = 3
PAUSE_SECONDS = 5.0

_FOREIGN_ERRORS = (
    ("aiohttp", "ClientError"),
    ("azure.core.exceptions", "AzureError"),
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("gcsfs.retry", "HttpError"),
    ("google.auth.exceptions", "GoogleAuthError"),
    ("paramiko.ssh_exception", "SSHException"),
)
"""Base classes of errors other than OSError. They are looked up in `sys.modules`: a module that is
not imported cannot have raised anything."""

_CHECK_CREDENTIALS = (
    "check the credentials (the storage's options, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
    "or a profile)"
)
_CHECK_ADDRESS = (
    "check the address (endpoint_url), that the server runs, and that this machine can reach it"
)
_UNREACHABLE = f"the server cannot be reached: {_CHECK_ADDRESS}"
_FOREIGN_404 = (
    "HTTP 404 without an S3 error document, which no storage answers: a proxy before it has no "
    "server behind it, or the address (endpoint_url) is another server's; try again later, or "
    "correct the address"
)
_REFUSED = "access was refused: allow these credentials to list, read, write and delete there"
_REGION = "the bucket is in another region: set client_kwargs.region_name in the options"
_BAD_CERTIFICATE = (
    "the server's certificate is not accepted: check the address, or set AWS_CA_BUNDLE"
)
_READ_TIMEOUT = (
    "the server stopped answering: try again later; on a slow connection, raise the limit "
    "with config_kwargs: {read_timeout: 300} in the storage's options (seconds)"
)

_BY_CODE = {
    "NoSuchBucket": "the bucket does not exist: create it, or correct the URL",
    "ContainerNotFound": "the container does not exist: create it, or correct the URL",
    "InvalidAccessKeyId": f"the server does not know the access key: {_CHECK_CREDENTIALS}",
    "SignatureDoesNotMatch": (
        f"the secret key does not match the access key: {_CHECK_CREDENTIALS}"
    ),
    "ExpiredToken": f"the session token has expired: {_CHECK_CREDENTIALS}",
    "InvalidToken": f"the session token is not valid: {_CHECK_CREDENTIALS}",
    "RequestTimeTooSkewed": "this machine's clock is wrong: set it",
    "AccessDenied": _REFUSED,
    "AllAccessDisabled": _REFUSED,
    "UserSuspended": "the server has suspended this user: ask who runs it",
    "403": _REFUSED,
    "PermanentRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "301": _REGION,
    "QuotaExceeded": "the storage's quota is used up: make room, or raise the quota",
    "SlowDown": "the server asks for fewer requests: try again later",
    "ServiceUnavailable": "the server is overloaded: try again later",
}
_BY_ERRNO = {
    errno.ENOSPC: "no space is left there: make room",
    errno.EDQUOT: "the disk quota is used up: make room",
    errno.EROFS: "the file system is mounted read-only: choose another folder",
    errno.ENOTDIR: "a part of the path is a file, not a folder: correct the path",
    errno.EEXIST: "a file is where a folder should be: correct the path",
    errno.EISDIR: "a folder is where a file should be: correct the path",
    errno.EACCES: "permission denied: give this user the right, or choose another folder",
    errno.EPERM: "not permitted: give this user the right, or choose another folder",
    errno.ENAMETOOLONG: "a name is longer than the file system allows: use shorter names",
    errno.ENOENT: "it does not exist",
    errno.EMFILE: "this process has too many open files: raise its limit (ulimit -n)",
    errno.ENFILE: "this machine has too many open files: raise its limit (sysctl fs.file-max)",
    errno.ECONNREFUSED: _UNREACHABLE,
    errno.EHOSTUNREACH: _UNREACHABLE,
    errno.ENETUNREACH: _UNREACHABLE,
}
_BY_TYPE_NAME = {
    "NoCredentialsError": f"no credentials were found: {_CHECK_CREDENTIALS}",
    "PartialCredentialsError": f"the credentials are incomplete: {_CHECK_CREDENTIALS}",
    "ProfileNotFound": f"the profile does not exist: {_CHECK_CREDENTIALS}",
    "EndpointConnectionError": _UNREACHABLE,
    "ConnectTimeoutError": f"the server does not answer: {_CHECK_ADDRESS}",
    "ReadTimeoutError": _READ_TIMEOUT,
    "SSLError": _BAD_CERTIFICATE,
}
_BY_TYPE: tuple[tuple[type[BaseException], str], ...] = (
    (PermissionError, _REFUSED),
    (FileNotFoundError, "it does not exist"),
    (ConnectionError, _UNREACHABLE),
    (TimeoutError, "the server did not answer in time: try again later"),
    (NotImplementedError, "this kind of storage does not support it: choose another storage"),
    (TypeError, "the storage does not know one of its options: correct the options"),
    (ValueError, "the URL or an option is not valid: correct it"),
)
_STATUS = ("status_code", "code")
"""The attributes of Azure's and Google's errors with the reply's status."""
_BUSY = (408, 425, 429)
"""The statuses of refusals that ask to try again later."""
_NOT_IMPLEMENTED = 501

ABSENCE_CODES = frozenset({"NoSuchKey", "BlobNotFound"})
"""The codes of S3 and Azure that say that an object does not exist. Any other 404 says nothing."""


def storage_exceptions() -> tuple[type[BaseException], ...]:
    """All classes of errors that a storage may raise. Use as ``except storage_exceptions()``."""
    found: list[type[BaseException]] = [OSError, NotImplementedError]
    for module, name in _FOREIGN_ERRORS:
        if module in sys.modules:
            found.append(getattr(sys.modules[module], name))
    return tuple(found)


def service_code(error: BaseException) -> str | None:
    """The code (``NoSuchBucket``) of the reply of S3 or Azure that caused `error`: ``404`` and so
    on, or empty, if the reply had no S3 error document; None without such a reply."""
    for cause in _causes(error):
        response = getattr(cause, "response", None)
        if isinstance(response, Mapping) and isinstance(response.get("Error"), Mapping):
            code = response["Error"].get("Code")
            return None if code is None else str(code)
        if (code := getattr(cause, "error_code", None)) is not None:  # Azure: text, or an Enum
            return str(getattr(code, "value", code))
    return None


def statuses(error: BaseException) -> Iterator[int]:
    """The HTTP status of the reply that caused `error`, by all names that libraries have for it."""
    for cause in _causes(error):
        response = getattr(cause, "response", None)
        reply = response.get("ResponseMetadata", {}) if isinstance(response, Mapping) else {}
        found = [reply.get("HTTPStatusCode"), *(getattr(cause, name, None) for name in _STATUS)]
        yield from (each for each in found if isinstance(each, int))


def is_foreign_404(response: object) -> bool:
    """Return whether botocore's parsed reply is a 404 without an S3 error document. A storage sends
    one with every 404, except to HEAD, which we never send."""
    return (
        isinstance(response, Mapping)
        and response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 404
        and response.get("Error", {}).get("Code") in (None, "", "404")
    )


def is_refusal(error: BaseException) -> bool:
    """Return whether the server refused the request as it is: not if the connection broke, or if
    the server failed or is busy. Then it may accept next time."""
    if _is_foreign(error):
        return False
    return any(isinstance(cause, FileExistsError) for cause in _causes(error)) or any(
        (400 <= status < 500 and status not in _BUSY) or status == _NOT_IMPLEMENTED
        for status in statuses(error)
    )


def _is_foreign(error: BaseException) -> bool:
    return any(is_foreign_404(getattr(cause, "response", None)) for cause in _causes(error))


class ErrorTranslator:
    """Translates errors of one storage or folder, whose `url` has no credentials any more."""

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self._secrets = secrets_in(url, options or {})
        self.url = self.redact(without_credentials(url))

    def redact(self, text: str) -> str:
        """The text with all credentials of the storage masked."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def shown(self, error: BaseException) -> str:
        """The error's class and message, or the server's code, for another message."""
        text = str(error)
        if text in ("", "None"):
            text = service_code(error) or "no further details"
        return self.redact(f"{type(error).__name__}: {text}")

    @contextmanager
    def translated(self, doing: str, *also: type[BaseException]) -> Iterator[None]:
        """Raise errors of the storage inside the block as `StorageError`: "cannot {doing} URL".
        `also`: further error classes that only the storage can raise inside the block."""
        try:
            yield
        except (*storage_exceptions(), *also) as error:
            shown = self.shown(error)
            trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            # A traceback prints the messages of its causes: drop causes that hold credentials.
            raise StorageError(f"cannot {doing} {self.url}: {_diagnosis(error)} [{shown}]") from (
                error if self.redact(trace) == trace else None
            )


def retry_storage(work: Callable[[], T]) -> T:
    """Do `work`, and repeat it after a pause if the storage fails: where no Prefect task does."""
    for number in range(1, TRIES):
        try:
            return work()
        except StorageError as error:
            _logger.warning(
                "the storage failed (try %d of %d), next try in %g s: %s",
                number, TRIES, PAUSE_SECONDS, error,
            )  # fmt: skip
            time.sleep(PAUSE_SECONDS)
    return work()


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, its cause, the cause's cause, ..."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _diagnosis(error: BaseException) -> str:
    code = service_code(error)
    if _is_foreign(error):
        return _FOREIGN_404
    if code is not None and code in _BY_CODE:
        return _BY_CODE[code]
    if isinstance(error, OSError) and code is None and error.errno in _BY_ERRNO:
        return _BY_ERRNO[error.errno]
    for cls in type(error).__mro__:
        if cls.__name__ in _BY_TYPE_NAME:
            return _BY_TYPE_NAME[cls.__name__]
    return next((advice for cls, advice in _BY_TYPE if isinstance(error, cls)), "it failed")
