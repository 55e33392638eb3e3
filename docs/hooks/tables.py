"""Each cell of a table with three or more columns names its column: phones show rows as lists."""

from __future__ import annotations

import re
from html import escape, unescape
from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    """A hook of MkDocs'; `stylesheets/extra.css` shows the names."""
    return re.sub(r"<table>.*?</table>", _labelled, html, flags=re.DOTALL)


def _labelled(table: re.Match[str]) -> str:
    heads = re.findall(r"<th\b[^>]*>(.*?)</th>", table[0], flags=re.DOTALL)
    names = [unescape(re.sub(r"<[^>]+>", "", head)).strip() for head in heads]
    if len(names) < 3:
        return table[0]

    def with_names(row: re.Match[str]) -> str:
        columns = iter(names)
        return re.sub("<td", lambda _: f'<td data-column="{escape(next(columns))}"', row[0])

    return re.sub(r"<tr\b.*?</tr>", with_names, table[0], flags=re.DOTALL)
