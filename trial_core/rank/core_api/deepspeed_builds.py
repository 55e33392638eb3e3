"""Prepares DeepSpeed's builds in a script, which may import DeepSpeed at any time, or never."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

DEEPSPEED = "deepspeed"


@contextmanager
def builds_prepared(local_rank: int) -> Iterator[None]:
    """Have `prepare_op_builds` called once the block imports DeepSpeed. Every rank calls this."""

    def prepare() -> None:
        from trial_core.deepspeed.op_builds import prepare_op_builds

        prepare_op_builds(local_rank)

    if DEEPSPEED in sys.modules:
        prepare()
        yield
        return
    finder = _AfterImport(prepare)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        finder.leave()


class _AfterImport(MetaPathFinder):
    """Finds DeepSpeed as Python would, and calls `then` after its import.

    It stays when a caller, such as transformers, only asks where DeepSpeed is.
    """

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find DeepSpeed for an import, and have `then` called after it."""
        if fullname != DEEPSPEED:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_then(module: ModuleType) -> None:
                self.leave()
                execute(module)
                self._then()

            spec.loader.exec_module = execute_and_then  # type: ignore[method-assign]
        return spec

    def leave(self) -> None:
        """Have Python no longer ask this finder."""
        with suppress(ValueError):
            sys.meta_path.remove(self)
