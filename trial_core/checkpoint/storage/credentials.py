"""Finds credentials in URLs and options: they must never be shown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

BLOCK = "block"
"""The option that names a block of credentials, until a flow has read it."""

_SECRET_OPTION = re.compile(
    # Not tokenizers and authors, and not which kind of secret it is: signature_version.
    r"^(?!.*(?:mechanism|method|model|type|version)$)"
    r".*(?:key|secret|token(?!iz)|pass|cred|sas|sign|auth(?!or(?!i))|cookie|connection_string)",
    re.IGNORECASE,
)
_SHORTEST_SECRET = 4  # masking every "a" would garble the text
# A password may hold "@"; one that holds "/", which should be %2F, ends at the first "@". Digits
# before a "/" are a port, unless a host with a path seems to follow: then rather mask too much.
_USER_AND_PASSWORD = re.compile(
    r"(?<=://)[^/@:\[]*:(?!\d{1,5}/[^@]*(?:\?|@[^/]*$))([^/]*(?=@)|[^@]*)@"
)

_USER, _QUERY = re.compile(r"(?<=://)[^/\s]*@"), re.compile(r"\?[^\s)'\"]*=[^\s)'\"]*")


def without_credentials(url: str) -> str:
    """The URL without user and password, and without its query, which may be a signature. A user
    name without a password stays (``sftp://me@host``, ``abfs://container@account``): it is part of
    the location."""
    if url.partition("://")[0] == "file":
        return url  # a path: no character has a special meaning
    address = _USER_AND_PASSWORD.sub("", url)
    return address.partition("?")[0] if "://" in address else address


def without_users(text: str, shown: str = "") -> str:
    """A text whose URLs have `shown` in place of a user and password."""
    return _USER.sub(shown, text)


def without_url_secrets(text: str) -> str:
    """A message whose URLs have no users, passwords and queries, which may be keys."""
    return _QUERY.sub("?…", without_users(text, "***@"))


def secrets_in(url: str, options: Mapping[str, Any]) -> list[str]:
    """All credentials in a storage's URL and options, longest first."""
    found = {*_passwords(url), *_secret_options(options, is_secret=False)}
    return sorted((text for text in found if len(text) >= _SHORTEST_SECRET), key=len, reverse=True)


def _passwords(url: str) -> Iterator[str]:
    """The password in a URL, as written and percent-decoded."""
    for match in _USER_AND_PASSWORD.finditer(url):
        yield match[1]
        yield unquote(match[1])


def _secret_options(value: Any, is_secret: bool) -> Iterator[str]:
    """All texts below options whose names look like credentials."""
    if isinstance(value, Mapping):
        if "private_key" in value:  # a service account of Google's: the rest of it is public
            value = {key: value[key] for key in ("private_key", "private_key_id") if key in value}
        for key, item in value.items():
            yield from _secret_options(item, is_secret or bool(_SECRET_OPTION.search(str(key))))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _secret_options(item, is_secret)
    elif isinstance(value, str):
        yield from (value,) if is_secret else _passwords(value)
    elif is_secret and isinstance(value, int) and not isinstance(value, bool):
        yield str(value)  # a password of digits, which YAML has taken for a number
