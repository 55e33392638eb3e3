"""Trains a user's trial. The library below the flows; it does not use Prefect.

A Determined user changes ``determined.pytorch.deepspeed`` to ``trial_core.deepspeed``,
``determined.pytorch`` to ``trial_core.pytorch`` and ``determined.core`` to ``trial_core.core``;
docs/reference/determined-names.md lists all names.

Names are imported on first use, so importing the package is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trial_core import core, deepspeed, errors, pytorch
    from trial_core.checkpoint.store import CheckpointStore
    from trial_core.cluster_info import get_cluster_info
    from trial_core.core_api.init import init
    from trial_core.distributed import DistributedContext

__all__ = [
    "CheckpointStore",
    "DistributedContext",
    "core",
    "deepspeed",
    "errors",
    "get_cluster_info",
    "init",
    "pytorch",
]

_HOMES = {
    "CheckpointStore": "trial_core.checkpoint.store",
    "DistributedContext": "trial_core.distributed",
    "get_cluster_info": "trial_core.cluster_info",
    "init": "trial_core.core_api.init",
}


def __getattr__(name: str) -> Any:
    if name in ("core", "deepspeed", "errors", "pytorch"):
        return importlib.import_module(f"trial_core.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise _unknown(name)


def _unknown(name: str) -> AttributeError:
    from trial_core.unknown_names import unknown_name

    return unknown_name(__name__, name, __all__)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
