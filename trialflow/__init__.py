"""trialflow: trains DeepSpeed models as Prefect flows, with sharded checkpoints in object storage.

What flows of one's own are composed of: the flows `train`, `evaluate`, `search`, `retrain` and
`prune`; the tasks `export`, `promote` and `fetch`; their results; and `server`. The experiment's
configuration; what was stored: checkpoints and models; and the errors. The trial API is in
`trial_core.deepspeed` and `trial_core.pytorch`. Names are imported when they are first used, so
that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trial_core.checkpoint.store import CheckpointStore
    from trial_core.config import ExperimentConfig, load_config
    from trial_core.driver.result import TrialResult
    from trial_core.errors import (
        CheckpointDamaged,
        CheckpointError,
        CheckpointNotFound,
        CommitConflict,
        ConfigError,
        DeadlineExceeded,
        LaunchError,
        ModelNotFound,
        PromotionConflict,
        PromotionRefused,
        RankFailed,
        RegistryError,
        SearchError,
        SlotsError,
        Stalled,
        Stopped,
        StorageError,
        Superseded,
        TrialError,
        TrialflowError,
    )
    from trial_core.models.registry import Registry
    from trial_core.search.settings import SearchExperiment
    from trialflow.flows.evaluate import EvaluateResult, evaluate
    from trialflow.flows.prune import PruneResult, prune
    from trialflow.flows.retrain import retrain
    from trialflow.flows.retraining.outcome import RetrainResult
    from trialflow.flows.search import SearchResult, search
    from trialflow.flows.server.embedded_server import server
    from trialflow.flows.train import train
    from trialflow.tasks.checkpoint_use import ExportResult, export, fetch, promote

    __version__: str

__all__ = [
    "train",
    "evaluate",
    "search",
    "retrain",
    "prune",
    "export",
    "promote",
    "fetch",
    "TrialResult",
    "EvaluateResult",
    "SearchResult",
    "RetrainResult",
    "PruneResult",
    "ExportResult",
    "server",
    "load_config",
    "ExperimentConfig",
    "SearchExperiment",
    "CheckpointStore",
    "Registry",
    "TrialflowError",
    "ConfigError",
    "TrialError",
    "SlotsError",
    "LaunchError",
    "RankFailed",
    "Stalled",
    "Stopped",
    "DeadlineExceeded",
    "CheckpointError",
    "StorageError",
    "CheckpointNotFound",
    "CheckpointDamaged",
    "CommitConflict",
    "Superseded",
    "RegistryError",
    "ModelNotFound",
    "PromotionConflict",
    "PromotionRefused",
    "SearchError",
    "__version__",
]

_HOMES = {
    "train": "trialflow.flows.train",
    "evaluate": "trialflow.flows.evaluate",
    "search": "trialflow.flows.search",
    "retrain": "trialflow.flows.retrain",
    "prune": "trialflow.flows.prune",
    "export": "trialflow.tasks.checkpoint_use",
    "promote": "trialflow.tasks.checkpoint_use",
    "fetch": "trialflow.tasks.checkpoint_use",
    "TrialResult": "trial_core.driver.result",
    "EvaluateResult": "trialflow.flows.evaluate",
    "SearchResult": "trialflow.flows.search",
    "RetrainResult": "trialflow.flows.retraining.outcome",
    "PruneResult": "trialflow.flows.prune",
    "ExportResult": "trialflow.tasks.checkpoint_use",
    "server": "trialflow.flows.server.embedded_server",
    "load_config": "trial_core.config",
    "ExperimentConfig": "trial_core.config",
    "SearchExperiment": "trial_core.search.settings",
    "CheckpointStore": "trial_core.checkpoint.store",
    "Registry": "trial_core.models.registry",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("trialflow")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "trial_core.errors")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
