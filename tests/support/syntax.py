"""Syntax trees of the product's modules, parsed once for all tests of a process.

Tests that read many of them have the `xdist_group` "syntax".
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

from trial_core.common.python_source import without_collections


@functools.cache
def syntax_of(path: Path) -> ast.Module:
    """A module's syntax tree."""
    with without_collections():
        return ast.parse(path.read_text("utf-8"))
