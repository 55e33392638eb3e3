"""Writes `llms.txt` into the site: its pages in their order, for programs that read them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

_lines: list[str] = []


def on_nav(nav: Any, config: Any, files: Any) -> Any:
    """Note the pages: a heading for each section, a link for each page."""
    _lines[:] = [f"# {config.site_name}", "", f"> {config.site_description}", "", "## Pages", ""]
    _lines.extend(_listed(nav.items, 2))
    return nav


def on_post_build(config: Any) -> None:
    """Write the file beside the pages."""
    Path(config.site_dir, "llms.txt").write_text("\n".join(_lines) + "\n")


def _listed(items: Any, level: int) -> Iterator[str]:
    for item in items:
        if item.is_section:
            yield from ("", f"{'#' * level} {item.title}", "")
            yield from _listed(item.children, level + 1)
        else:
            yield f"- [{item.title}]({item.url})"
