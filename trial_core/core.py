"""The Core API: `init` gives any training loop reports, checkpoints and stop requests.

Follows ``determined.core``. docs/guides/core-api.md shows a script.
"""

from __future__ import annotations

from trial_core.common.lazy_names import lazy_names
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.core_api.checkpoints import CheckpointContext, DownloadMode
from trial_core.rank.core_api.context import (
    Context,
    EarlyExitReason,
    PreemptContext,
    PreemptMode,
    ProfilerContext,
    TensorboardMode,
    TrainContext,
)
from trial_core.rank.core_api.init import init
from trial_core.rank.core_api.searcher import SearcherContext, SearcherMode, SearcherOperation, Unit

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

__getattr__, __dir__ = lazy_names(__name__, __all__, {})
