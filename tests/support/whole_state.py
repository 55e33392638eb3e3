"""The state of a `PyTorchTrial` in a checkpoint's files, with sharded tensors joined."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from trial_core.controller.safe_load import Reader
from trial_core.pytorch.pytorch_state import GRADIENTS, MODELS, OPTIMIZERS, STATE_FILE
from trial_core.pytorch.sharded_state import SavedParts, joined


def whole_state(stored: Path) -> dict[str, Any]:
    """Every tensor and number below the folder of a checkpoint's files, by its dotted place."""
    parts = SavedParts(stored, (MODELS, OPTIMIZERS, GRADIENTS), Reader())
    state = joined(
        Reader().load(stored / STATE_FILE),
        parts,
        lambda _, saved: torch.empty(saved.shape, dtype=saved.dtype) if saved.is_meta else None,
    )
    return dict(_flat(state))


def _flat(value: Any, place: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return [(place, value)]
    found = []
    for key, item in value.items():
        found += _flat(item, f"{place}.{key}".strip("."))
    return found
