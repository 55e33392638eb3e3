"""Text from outside (metric names, error messages) in Markdown."""

from __future__ import annotations

from trialflow.tasks.report.text_filters import shortened


def escaped(text: str) -> str:
    """The text's first line, shortened, with Markdown's special characters escaped."""
    line = shortened(text)
    for special in ("\\", "|", "*", "`", "["):
        line = line.replace(special, f"\\{special}")
    return line.replace("<", "&lt;")
