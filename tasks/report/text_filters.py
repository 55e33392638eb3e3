"""The templates' filters for numbers, times and text, in Markdown and in HTML."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trial_core import text_format

MAX_CHARACTERS = 300


def shortened(text: str) -> str:
    """The text's first line, cleaned and shortened."""
    line = text_format.one_line(text)
    return line if len(line) <= MAX_CHARACTERS else line[:MAX_CHARACTERS] + "…"


def _metric(value: Any) -> str:
    return "" if value is None else shortened(text_format.number(value))


FILTERS: Mapping[str, Callable[..., str]] = {
    "shortened": lambda value: shortened(str(value)),
    "duration": lambda seconds: "" if seconds is None else text_format.duration(seconds),
    "metric": _metric,
    "percent": "{:.0%}".format,
    "size": text_format.size,
    "speed": text_format.speed,
}
