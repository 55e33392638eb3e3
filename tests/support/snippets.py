"""The snippets of the documents: fenced blocks, with their language and title."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("examples/*/README.md")),
    *sorted(ROOT.glob("benchmarks/*.md")),
]

_FENCE = re.compile(
    r'^```(?P<language>\w*)(?: title="(?P<title>[^"\n]+)")?\n(?P<text>.*?)^```$',
    re.DOTALL | re.MULTILINE,
)
_COMMENT = re.compile(r"(?:^|\s+)#\s.*$")


@dataclass(frozen=True)
class Snippet:
    """A fenced block.

    Attributes:
        document: the path from the repository's root.
        line: of the opening fence, counted from 1.
        title: the name of the file that the block shows; empty: it is no file.
    """

    document: str
    line: int
    language: str
    title: str
    text: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"

    def commands(self) -> Iterator[str]:
        """The commands of a shell block, without comments; continued lines are joined."""
        for line in self.text.replace("\\\n", " ").splitlines():
            if command := _COMMENT.sub("", line).strip():
                yield command

    def program(self) -> str:
        """The Python program; of a diff, the program after the change."""
        if self.language == "diff":
            return re.sub(r"^(-.*\n|[+ ])", "", self.text, flags=re.MULTILINE)
        return self.text


def merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `change`; mappings of both are merged."""
    both = dict(base)
    for key, value in change.items():
        old = both.get(key)
        is_deeper = isinstance(old, Mapping) and isinstance(value, Mapping)
        both[key] = merged(old, value) if is_deeper else value
    return both


def snippets(document: Path) -> list[Snippet]:
    """The snippets of a document, in its order.

    Raises:
        AssertionError: the document has a fence that no snippet begins or ends with.
    """
    text = document.read_text()
    name = str(document.relative_to(ROOT))
    found = [
        Snippet(
            name, text.count("\n", 0, match.start()) + 1, match["language"], match["title"] or "",
            match["text"],
        )
        for match in _FENCE.finditer(text)
    ]  # fmt: skip
    fences = re.findall(r"^ *```", text, flags=re.MULTILINE)
    assert len(fences) == 2 * len(found), f"{name}: a fence that is not understood"
    return found


SNIPPETS = [snippet for document in DOCUMENTS for snippet in snippets(document)]
