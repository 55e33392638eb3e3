"""Markdown for the reports: their templates, and text from outside in them.

Such text (names of metrics, messages, paths) is not read as markup, in Markdown or its HTML.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from trial_core.common import text_format

MAX_CHARACTERS = 300
# An underscore within a word is not markup.
_SPECIAL = re.compile(r"[\\|*`\[&]|(?<![^\W_])_|_(?![^\W_])")
_PAGE = re.compile(r"https?://[!-;=?-~]+")  # no space, control character, or angle bracket


def template(name: str) -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=name.endswith(".html.j2"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= FILTERS
    return environment.get_template(name)


def shortened(text: str) -> str:
    """The text's first line, cleaned and shortened."""
    return text_format.shortened(text, MAX_CHARACTERS)


def escaped(text: str) -> str:
    """The text's first line, shortened, with Markdown's special characters escaped."""
    return _SPECIAL.sub(r"\\\g<0>", shortened(text)).replace("<", "&lt;")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], rule: str = "---") -> str:
    """A table of texts, which are escaped; `rule` aligns its columns."""
    shown = [list(map(escaped, row)) for row in (columns, *rows)]
    lines = [shown[0], [rule] * len(columns), *shown[1:]]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def code(text: str) -> str:
    """The text's first line, shortened, as code that it cannot end."""
    line = shortened(text).replace("`", "'")
    return f"`{line}`"


def code_in_cell(text: str) -> str:
    """`code` in a table, where a bar would end it."""
    return code(text.replace("|", "¦"))


def place(text: str) -> str:
    """A link to a page; of any other place, its text as code."""
    return f"<{text}>" if _PAGE.fullmatch(text) else code(text)


def _metric(value: Any) -> str:
    return "" if value is None else shortened(text_format.number(value))


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else escaped(str(value))


FILTERS: Mapping[str, Callable[..., str]] = {
    "code": code,
    "code_in_cell": code_in_cell,
    "duration": lambda seconds: "" if seconds is None else text_format.duration(seconds),
    "escaped": lambda value: escaped(str(value)),
    "metric": _metric,
    "place": place,
    "percent": "{:.0%}".format,
    "shortened": lambda value: shortened(str(value)),
    "size": text_format.size,
    "value": _value,
}
"""The templates' filters for numbers, times and text."""
