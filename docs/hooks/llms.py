"""For programs that read the site: each page as Markdown beside it, listed in `llms.txt`.

The Markdown is made from the page's HTML: it has what the page generates from the code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bs4 import BeautifulSoup
from markdownify import ATX, MarkdownConverter

LEFT_OUT = ".headerlink, .md-annotation, script, style"
"""What is there for a reader's mouse: signs that link to headings."""

_lines: list[str] = []


def on_nav(nav: Any, config: Any, files: Any) -> Any:
    """Note the pages: a heading for each section, a link for each page."""
    _lines[:] = [f"# {config.site_name}", "", f"> {config.site_description}", "", "## Pages", ""]
    _lines.extend(_listed(nav.items, 2))
    return nav


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Write the page's Markdown beside it; its links lead to the Markdown of other pages."""
    content = BeautifulSoup(html, "html.parser")
    for each in content.select(LEFT_OUT):
        each.decompose()
    for link in content.select("a[href]"):
        if "://" not in str(link["href"]):
            link["href"] = _markdown(str(link["href"]))
    path = Path(config.site_dir, _markdown(page.file.dest_uri))
    path.parent.mkdir(parents=True, exist_ok=True)
    converter = MarkdownConverter(
        heading_style=ATX,
        bullets="-",
        escape_underscores=False,
        escape_asterisks=False,
        code_language_callback=_language,
    )
    text = str(converter.convert_soup(content)).strip()
    path.write_text(re.sub(r"\n{3,}", "\n\n", text) + "\n", encoding="utf-8")
    return html


def on_post_build(config: Any) -> None:
    """Write `llms.txt`."""
    Path(config.site_dir, "llms.txt").write_text("\n".join(_lines) + "\n")


def _listed(items: Any, level: int) -> Iterator[str]:
    for item in items:
        if item.is_section:
            yield from ("", f"{'#' * level} {item.title}", "")
            yield from _listed(item.children, level + 1)
        else:
            yield f"- [{item.title}]({_markdown(item.url)})"


def _markdown(url: str) -> str:
    """The address of the Markdown beside a page."""
    return re.sub(r"\.html(?=#|$)", ".md", url)


def _language(block: Any) -> str:
    """The language of a code block, which its frame names: ``language-sh highlight``."""
    frame = block.find_parent(class_="highlight")
    names = frame["class"] if frame else []
    return next((name.partition("-")[2] for name in names if name.startswith("language-")), "")
