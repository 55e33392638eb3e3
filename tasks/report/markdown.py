"""Text from outside (metric names, error messages) in Markdown."""

from __future__ import annotations

from trial_core import text_format

MAX_CHARACTERS = 300


def escaped(text: str) -> str:
    """The text's first line, shortened, with Markdown's special characters escaped."""
    line = text_format.one_line(text)
    if len(line) > MAX_CHARACTERS:
        line = line[:MAX_CHARACTERS] + "…"
    for special in ("\\", "|", "*", "`", "["):
        line = line.replace(special, f"\\{special}")
    return line.replace("<", "&lt;")
