"""What has a meaning without a server of ``determined.experimental``: see `client`."""

from __future__ import annotations

from trial_core.experimental import client
from trial_core.experimental.client import Checkpoint, Determined, Model, ModelVersion, Trial
from trial_core.lazy_names import lazy_names

__all__ = ["Checkpoint", "Determined", "Model", "ModelVersion", "Trial", "client"]

__getattr__, __dir__ = lazy_names(__name__, __all__, {})
