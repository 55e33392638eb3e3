"""What the documents say of each other is true, and none of them is half written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("examples/*/README.md")),
    *sorted(ROOT.glob("benchmarks/*.md")),
]

CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
TARGET = re.compile(r"\]\(([^)\s]+)\)")
SCHEME = re.compile(r"[a-z]+:")
# The last: a table's cell that waits for a figure, such as RATIO1.
PLACEHOLDER = re.compile(r"\b(?:FIGURES|TODO|FIXME|XXX)\b|\|\s*[A-Z]{3,}\d\b")


def name(document: Path) -> str:
    return str(document.relative_to(ROOT))


def test_there_are_documents() -> None:
    """The patterns above find what a visitor reads first."""
    assert {
        "README.md",
        "docs/reference/determined-names.md",
        "examples/gpt_stdlib/README.md",
    } <= set(map(name, DOCUMENTS))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_and_images_resolve(document: Path) -> None:
    """Whatever a document links to or shows from this repository is there."""
    targets = TARGET.findall(CODE.sub("", document.read_text()))
    paths = [target.partition("#")[0] for target in targets if not SCHEME.match(target)]
    assert [path for path in paths if not (document.parent / path).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_no_placeholder_is_left(document: Path) -> None:
    """A word that stands for text to come has given way to the text."""
    assert PLACEHOLDER.findall(document.read_text()) == []
