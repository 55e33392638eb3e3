"""Makes torch believe that tensors are on another rank's device when they are saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch

DEVICE = "accelerator:1"


def on_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, tensors are saved as those of `DEVICE`. To load one there is an error."""

    def tag(storage: Any) -> str:
        return DEVICE

    def restore(storage: Any, location: str) -> None:
        if location == DEVICE:
            raise AssertionError(f"a tensor was loaded onto {DEVICE}, another rank's")

    registry = [(0, tag, restore), *torch.serialization._package_registry]
    monkeypatch.setattr(torch.serialization, "_package_registry", registry)
