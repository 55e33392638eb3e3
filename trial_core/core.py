"""The Core API: `init` gives any training loop reports, checkpoints and stop requests.

Follows ``determined.core``. docs/guides/core-api.md shows a script.
"""

from __future__ import annotations

from trial_core.core_api.checkpoints import CheckpointContext, DownloadMode
from trial_core.core_api.context import Context, PreemptContext, PreemptMode, TrainContext
from trial_core.core_api.init import init
from trial_core.core_api.searcher import SearcherContext, SearcherMode, SearcherOperation, Unit
from trial_core.distributed import DistributedContext

__all__ = [
    "CheckpointContext",
    "Context",
    "DistributedContext",
    "DownloadMode",
    "PreemptContext",
    "PreemptMode",
    "SearcherContext",
    "SearcherMode",
    "SearcherOperation",
    "TrainContext",
    "Unit",
    "init",
]
