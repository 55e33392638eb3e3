"""The state of a `PyTorchTrial` in a checkpoint's files, with sharded tensors joined."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trial_core.pytorch.pytorch_state import MODELS, OPTIMIZERS, read_state
from trial_core.rank.state_files.safe_load import Reader


def whole_state(stored: Path) -> dict[str, Any]:
    """Every tensor and number below the folder of a checkpoint's files, by its dotted place."""
    return dict(_flat(read_state(stored, Reader(), (MODELS, OPTIMIZERS))))


def _flat(value: Any, place: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return [(place, value)]
    found = []
    for key, item in value.items():
        found += _flat(item, f"{place}.{key}".strip("."))
    return found
