"""Reading Python source while other threads run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Within it, `ast.parse` (also in `inspect.getsource` of a class) can be relied on. In Python
    3.11.7, a garbage collection that runs Python code meanwhile, and so calls it again, ends it
    with a SystemError ("AST constructor recursion depth mismatch", gh-106905)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
