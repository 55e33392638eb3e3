"""What went wrong with a storage, in plain words: what was seen, and what to do about it.

Behind fsspec every storage raises errors of its own. Here they become `StorageError`, without the
credentials that a URL, an option or a server's reply may hold.
"""

from __future__ import annotations

import asyncio
import errno
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

from trial_core.errors import StorageError

_FOREIGN_ERRORS = (
    ("aiohttp", "ClientError"),
    ("azure.core.exceptions", "AzureError"),
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("gcsfs.retry", "HttpError"),
    ("google.auth.exceptions", "GoogleAuthError"),
    ("obstore.exceptions", "BaseError"),
    ("paramiko.ssh_exception", "SSHException"),
)
"""Base classes of errors that are no OSError. Looked up, not imported: a module that nobody has
imported has not raised anything."""

_CREDENTIALS = (
    "check the credentials (the storage's options, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
    "or a profile)"
)
_REACH = "check the address (endpoint_url) and that the server runs and can be reached from here"
_RIGHTS = "the credentials must allow listing, reading, writing and deleting there"
_REGION = "the bucket lives in another region: set client_kwargs.region_name in the options"

_SILENCE = (
    "try again later; where the way there is only slow, give it more time: "
    "config_kwargs: {read_timeout: 300} in the storage's options (seconds)"
)

_BY_CODE = {
    "NoSuchBucket": "the bucket does not exist: create it, or correct the URL",
    "InvalidAccessKeyId": f"the access key is not known to the server: {_CREDENTIALS}",
    "SignatureDoesNotMatch": f"the secret key does not fit the access key: {_CREDENTIALS}",
    "ExpiredToken": f"the session token has expired: {_CREDENTIALS}",
    "InvalidToken": f"the session token is not valid: {_CREDENTIALS}",
    "RequestTimeTooSkewed": "this machine's clock is wrong: set it",
    "AccessDenied": f"access was refused: {_RIGHTS}",
    "AllAccessDisabled": f"access was refused: {_RIGHTS}",
    "403": f"access was refused: {_RIGHTS}",
    "PermanentRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "301": _REGION,
    "QuotaExceeded": "the storage's quota is used up: make room, or have it raised",
    "SlowDown": "the server asks for fewer requests: try again later",
    "ServiceUnavailable": "the server is overloaded: try again later",
}
_BY_ERRNO = {
    errno.ENOSPC: "no space is left there: make room",
    errno.EDQUOT: "the disk quota is used up: make room",
    errno.EROFS: "the file system is mounted read-only: choose another place",
    errno.ENOTDIR: "a part of the path is a file, not a folder: correct the path",
    errno.EEXIST: "something that is no folder is in the way: correct the path",
    errno.EISDIR: "a folder is where a file should be: correct the path",
    errno.EACCES: "permission denied: give this user the right, or choose another place",
    errno.EPERM: "not permitted: give this user the right, or choose another place",
    errno.ENAMETOOLONG: "a name is longer than the file system allows: use shorter ones",
    errno.ENOENT: "it does not exist",
    errno.ECONNREFUSED: f"the server cannot be reached: {_REACH}",
    errno.EHOSTUNREACH: f"the server cannot be reached: {_REACH}",
    errno.ENETUNREACH: f"the server cannot be reached: {_REACH}",
}
_BY_TYPE_NAME = {
    "NoCredentialsError": f"no credentials were found: {_CREDENTIALS}",
    "PartialCredentialsError": f"the credentials are incomplete: {_CREDENTIALS}",
    "ProfileNotFound": f"the profile does not exist: {_CREDENTIALS}",
    "EndpointConnectionError": f"the server cannot be reached: {_REACH}",
    "ConnectTimeoutError": f"the server does not answer: {_REACH}",
    "ReadTimeoutError": f"the server stopped answering: {_SILENCE}",
    "SSLError": "the server's certificate is not accepted: check the address, or AWS_CA_BUNDLE",
    "PermissionDeniedError": f"access was refused: {_RIGHTS}",
    "UnauthenticatedError": f"access was refused: {_CREDENTIALS}",
}
# obstore has one class for most of what goes wrong on the way to a server.
_BY_WORDS = (
    ("NoCredentialsError", f"no credentials were found: {_CREDENTIALS}"),
    ("dns error", f"the server cannot be reached: {_REACH}"),
    ("tcp connect error", f"the server cannot be reached: {_REACH}"),
    (
        "certificate",
        "the server's certificate is not accepted: check the address, or AWS_CA_BUNDLE",
    ),
    ("TimedOut", f"the server stopped answering: {_SILENCE}"),
    ("Http", "the connection broke: try again later"),
)
_DETAILS = "\n\nDebug source:"  # obstore's, many lines
_REPLY = re.compile(r"<(\?xml|Error>).*", re.DOTALL)
_CODE_IN_REPLY = re.compile(r"<Code>(\w+)</Code>")
_BY_TYPE: tuple[tuple[type[BaseException], str], ...] = (
    (PermissionError, f"access was refused: {_RIGHTS}"),
    (FileNotFoundError, "it does not exist"),
    (ConnectionError, f"the server cannot be reached: {_REACH}"),
    (TimeoutError, "the server did not answer in time: try again later"),
    (asyncio.TimeoutError, "the server did not answer in time: try again later"),
    (NotImplementedError, "this kind of storage does not support it: choose another one"),
    (TypeError, "an option given to the storage is not one it knows: correct the options"),
    (ValueError, "the URL or an option is not understood: correct it"),
)

_SECRET_OPTION = re.compile(
    r"key|secret|token|pass|cred|sas|sign|auth|cookie|connection_string", re.IGNORECASE
)
_SHORTEST_SECRET = 4  # masking every "a" would only garble the text
_USER_AND_PASSWORD = re.compile(r"(?<=://)[^/@:]*:([^/]*)@")


def without_credentials(url: str) -> str:
    """The URL as it may be shown: without a password and its user, and without a signed query.

    A name alone stays (``sftp://me@host``, ``abfs://container@account``): it is part of the place.
    """
    if url.partition("://")[0] == "file":
        return url  # a path, in which every character stands for itself
    address = _USER_AND_PASSWORD.sub("", url)
    return address.partition("?")[0] if "://" in address else address


def of_rank(rank: int, message: str) -> str:
    """What a rank says went wrong there, with the rank named once."""
    return message if message.startswith(f"rank {rank} ") else f"rank {rank}: {message}"


def storage_exceptions() -> tuple[type[BaseException], ...]:
    """Every class of error that a storage may raise. Use as ``except storage_exceptions()``."""
    found: list[type[BaseException]] = [OSError, asyncio.TimeoutError, NotImplementedError]
    for module, name in _FOREIGN_ERRORS:
        if module in sys.modules:
            found.append(getattr(sys.modules[module], name))
    return tuple(found)


def service_code(error: BaseException) -> str | None:
    """The code in an S3 server's reply (``NoSuchBucket``) that led to `error`, if there was one."""
    for link in _chain(error):
        response = getattr(link, "response", None)
        if isinstance(response, Mapping) and isinstance(response.get("Error"), Mapping):
            code = response["Error"].get("Code")
            return None if code is None else str(code)
        if reply := _CODE_IN_REPLY.search(str(link)):  # obstore gives it as it came
            return reply[1]
    return None


class Explainer:
    """Turns errors of one storage into `StorageError`, without its credentials."""

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self._secrets = _secrets_in(url, options or {})
        self.url = self.hide(without_credentials(url))

    def hide(self, text: str) -> str:
        """The text without any of the storage's credentials."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    @contextmanager
    def explaining(self, doing: str, *also: type[BaseException]) -> Iterator[None]:
        """What a storage raises inside the block leaves it as `StorageError`.

        Args:
            doing: what is tried, to follow "cannot": ``"write to"``. The URL follows.
            also: further classes that here can only come from the storage.

        Raises:
            StorageError: what happened, why, and what to do.
        """
        try:
            yield
        except (*storage_exceptions(), *also) as error:
            shown = self.hide(f"{type(error).__name__}: {_text(error)}")
            trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            # A traceback prints the causes' messages: keep them only where nothing is given away.
            raise StorageError(f"cannot {doing} {self.url}: {_diagnosis(error)} [{shown}]") from (
                error if self.hide(trace) == trace else None
            )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _text(error: BaseException) -> str:
    """What the error says; a server's code where it says nothing."""
    text = _REPLY.sub(service_code(error) or "", str(error).partition(_DETAILS)[0])
    return text if text not in ("", "None") else service_code(error) or "no further details"


def _diagnosis(error: BaseException) -> str:
    code = service_code(error)
    if code is not None and code in _BY_CODE:
        return _BY_CODE[code]
    if isinstance(error, OSError) and code is None and error.errno in _BY_ERRNO:
        return _BY_ERRNO[error.errno]
    for cls in type(error).__mro__:
        if cls.__name__ in _BY_TYPE_NAME:
            return _BY_TYPE_NAME[cls.__name__]
    if type(error).__module__.startswith("obstore"):
        text = str(error)
        return next((words for sign, words in _BY_WORDS if sign in text), "it failed")
    return next((words for cls, words in _BY_TYPE if isinstance(error, cls)), "it failed")


def _secrets_in(url: str, options: Mapping[str, Any]) -> list[str]:
    """Texts that must never be shown, longest first."""
    found = {*_passwords(url), *_leaves(options, is_secret=False)}
    return sorted((text for text in found if len(text) >= _SHORTEST_SECRET), key=len, reverse=True)


def _passwords(url: str) -> Iterator[str]:
    """The password in a URL, as written and as meant."""
    for match in _USER_AND_PASSWORD.finditer(url):
        yield match[1]
        yield unquote(match[1])


def _leaves(value: Any, is_secret: bool) -> Iterator[str]:
    """All texts under options whose names speak of credentials."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, is_secret or bool(_SECRET_OPTION.search(str(key))))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item, is_secret)
    elif isinstance(value, str):
        yield from (value,) if is_secret else _passwords(value)
