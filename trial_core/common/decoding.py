"""Decodes stored and sent JSON into our types, in any thread.

msgspec examines a type when it first decodes one. If two threads do that at once, the process dies
of a segmentation fault (seen with msgspec 0.22). Here types are examined one at a time.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_examining = threading.Lock()
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def decode(data: bytes, kind: type[T]) -> T:
    """The value of type `kind` in a JSON document; MsgspecError if it is not, or is nested too
    deeply."""
    try:
        value: T = decoder(kind).decode(data)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error
    return value


def convert(fields: Any, kind: type[T]) -> T:
    """The value of type `kind` with these plain fields; MsgspecError or RecursionError if they are
    not."""
    decoder(kind)
    return msgspec.convert(fields, kind)


def decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """The decoder of a type, unions and tuples included, for use in any thread."""
    with _examining:
        if kind not in _decoders:
            _decoders[kind] = msgspec.json.Decoder(kind)
        return _decoders[kind]
