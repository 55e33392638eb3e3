"""What has a meaning without a server of ``determined.experimental``: `client`, `core_v2`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trial_core.common.lazy_names import lazy_names
from trial_core.experimental import client
from trial_core.experimental.client import Checkpoint, Determined, Model, ModelVersion, Trial

if TYPE_CHECKING:
    from trial_core.experimental import core_v2

__all__ = ["Checkpoint", "Determined", "Model", "ModelVersion", "Trial", "client", "core_v2"]

__getattr__, __dir__ = lazy_names(__name__, __all__, {})
