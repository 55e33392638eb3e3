"""A run's token, with which agents prove that they belong to it."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

from trial_core.errors import LaunchError

MIN_CHARACTERS = 32


def new_token() -> str:
    """A token that cannot be guessed."""
    return secrets.token_hex(32)


def checked_token(text: str, source: str) -> str:
    """The token that was read from a source. Raises LaunchError if it is too short."""
    token = text.strip()
    if len(token) < MIN_CHARACTERS:
        raise LaunchError(
            f"{source} has {len(token)} characters, and a token at least {MIN_CHARACTERS} that "
            "cannot be guessed: write one with `openssl rand -hex 32`"
        )
    return token


def token_of_file(path: Path) -> str:
    """The token in a file. Raises LaunchError if it cannot be read, or is too short."""
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise LaunchError(f"the token in {path} cannot be read: {error.strerror}") from error
    return checked_token(text, str(path))


def read_token(path: Path | None) -> str:
    """The token in a file, or without one from stdin. Raises as `token_of_file`."""
    if path is not None:
        return token_of_file(path)
    text = sys.stdin.buffer.read().decode(errors="replace")
    return checked_token(text, "standard input")


def write_token(path: Path) -> str:
    """Write a new token to a file that only this user can read. Raises LaunchError."""
    token = new_token()
    try:
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as file:
            file.write(token)
    except OSError as error:
        raise LaunchError(f"a token cannot be written to {path}: {error.strerror}") from error
    return token
