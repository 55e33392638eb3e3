"""`--json`: what a command prints for programs. `docs/hooks/json_types.py` has the types."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from typing import Annotated, Any

from cyclopts import Parameter

SCHEMA_VERSION = 1
"""Greater if a field is removed, or gets another meaning. Fields may be added at any time."""

AsJson = Annotated[bool, Parameter(name="--json", negative=(), help="Print JSON.")]

_taken: ContextVar[list[dict[str, Any]] | None] = ContextVar("taken", default=None)


def print_json(command: str, result: Mapping[str, Any]) -> None:
    """Print a command's result to stdout: one object, which names the command and the version.

    Args:
        result: plain data and records. NaN and infinities become null.
    """
    document = json_document(command, result)
    if (taken := _taken.get()) is not None:
        taken.append(document)
    else:
        print(json_text(document, indent=2), flush=True)


@contextmanager
def taking_results() -> Iterator[list[dict[str, Any]]]:
    """Collect what commands of this context print as JSON, instead of printing it."""
    results: list[dict[str, Any]] = []
    token = _taken.set(results)
    try:
        yield results
    finally:
        _taken.reset(token)


def json_document(command: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """A result as plain data, as JSON has it."""
    head = {"command": command, "schema_version": SCHEMA_VERSION}
    plain: dict[str, Any] = json.loads(json_text({**head, **result}))
    return plain


def json_text(document: Mapping[str, Any], indent: int = 0) -> str:
    """JSON text; on one line if `indent` is 0."""
    import msgspec

    text = msgspec.json.encode(document)
    text = msgspec.json.format(text, indent=indent) if indent else text
    # msgspec leaves these, which a terminal may obey.
    return re.sub(r"[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", text.decode())


@contextmanager
def stdout_for_json(is_json: bool) -> Iterator[None]:
    """If stdout is for JSON alone: what the block and its child processes print goes to stderr."""
    if not is_json:
        yield
        return
    sys.stdout.flush()
    stdout = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
