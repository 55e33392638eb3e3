"""Griffe extension: a docstring's `::` before a code block (reStructuredText) becomes `:`."""

from __future__ import annotations

import re
from typing import Any

import griffe


class LiteralBlocks(griffe.Extension):
    """Markdown needs only the indentation of a code block."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Part of griffe's extension interface."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"::\n\n", ":\n\n", obj.docstring.value)
