"""The Core API: `init` gives any training loop reports, checkpoints and stop requests.

Follows ``determined.core``. docs/guides/core-api.md shows a script.
"""

from __future__ import annotations

from typing import Any

from trial_core.core_api.checkpoints import CheckpointContext, DownloadMode
from trial_core.core_api.context import (
    Context,
    EarlyExitReason,
    PreemptContext,
    PreemptMode,
    ProfilerContext,
    TensorboardMode,
    TrainContext,
)
from trial_core.core_api.init import init
from trial_core.core_api.searcher import SearcherContext, SearcherMode, SearcherOperation, Unit
from trial_core.distributed import DistributedContext
from trial_core.unknown_names import unknown_name

__all__ = [
    "CheckpointContext",
    "Context",
    "DistributedContext",
    "DownloadMode",
    "EarlyExitReason",
    "PreemptContext",
    "PreemptMode",
    "ProfilerContext",
    "SearcherContext",
    "SearcherMode",
    "SearcherOperation",
    "TensorboardMode",
    "TrainContext",
    "Unit",
    "init",
]


def __getattr__(name: str) -> Any:
    raise unknown_name(__name__, name, __all__)
