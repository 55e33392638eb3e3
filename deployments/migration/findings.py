"""What a migration makes of one file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Finding:
    """Something that a person has to look at.

    Attributes:
        line: where it is, from 1 on; 0: in the file as a whole.
        text: what it is, and what to do.
    """

    line: int
    text: str


@dataclass(frozen=True)
class Migrated:
    """A file's new content, which may be its old one, and what could not be changed."""

    content: bytes
    findings: list[Finding]
