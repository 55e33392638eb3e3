"""Trains a user's trial. The library below the flows; it does not use Prefect.

A Determined user changes ``determined.pytorch.deepspeed`` to ``trial_core.deepspeed``,
``determined.pytorch`` to ``trial_core.pytorch`` and ``determined.core`` to ``trial_core.core``;
docs/reference/determined-names.md lists all names.

Names are imported on first use, so importing the package is cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trial_core.common import lean_imports
from trial_core.common.lazy_names import lazy_names

if TYPE_CHECKING:
    from trial_core import core, deepspeed, errors, experimental, pytorch, transformers, util
    from trial_core.checkpoint.store import CheckpointStore
    from trial_core.cluster_info import ClusterInfo, TrialInfo, get_cluster_info
    from trial_core.errors import InvalidHP
    from trial_core.rank.collectives.distributed import DistributedContext
    from trial_core.rank.core_api.init import init
    from trial_core.trainer.load_trial import import_from_path

__all__ = [
    "CheckpointStore",
    "ClusterInfo",
    "DistributedContext",
    "InvalidHP",
    "LOG_FORMAT",
    "TrialInfo",
    "core",
    "deepspeed",
    "errors",
    "experimental",
    "get_cluster_info",
    "import_from_path",
    "init",
    "pytorch",
    "transformers",
    "util",
]

lean_imports.install()

LOG_FORMAT = "%(levelname)s: [%(process)s] %(name)s: %(message)s"
"""A format for a script's `logging.basicConfig`; any other will do."""

_HOMES = {
    "CheckpointStore": "trial_core.checkpoint.store",
    "ClusterInfo": "trial_core.cluster_info",
    "DistributedContext": "trial_core.rank.collectives.distributed",
    "InvalidHP": "trial_core.errors",
    "TrialInfo": "trial_core.cluster_info",
    "get_cluster_info": "trial_core.cluster_info",
    "import_from_path": "trial_core.trainer.load_trial",
    "init": "trial_core.rank.core_api.init",
}

__getattr__, __dir__ = lazy_names(__name__, __all__, _HOMES)
