"""What has a meaning without a server of ``determined.experimental``: see `client`."""

from __future__ import annotations

from trial_core.common.lazy_names import lazy_names
from trial_core.experimental import client
from trial_core.experimental.client import Checkpoint, Determined, Model, ModelVersion, Trial

__all__ = ["Checkpoint", "Determined", "Model", "ModelVersion", "Trial", "client"]

__getattr__, __dir__ = lazy_names(__name__, __all__, {})
