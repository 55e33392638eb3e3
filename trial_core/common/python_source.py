"""Reading Python source while other threads run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Within it, `ast.parse` (also the one in `inspect.getsource` of a class) can be relied on.

    In Python 3.11.7, a garbage collection in the middle of it that runs Python code, which calls
    it once more in this thread or lets another one, ends it with a SystemError ("AST constructor
    recursion depth mismatch", gh-106905).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
