"""`init`: the context of a Core API script. Follows ``determined.core.init``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trial_core.core.context import Context
from trial_core.core.script_host import current_host
from trial_core.distributed import DistributedContext


@contextmanager
def init(*, distributed: DistributedContext | None = None) -> Iterator[Context]:
    """x"""
    host = current_host()
    assert host
    yield Context(host)
