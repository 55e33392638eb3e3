"""Compares the tensors of two checkpoints bit by bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from trial_core.checkpoint import layout
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig
from trial_core.rank.state_files.safe_load import Reader


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of every file below `folder`, by file and position.

    Frozen weights are also found in the file that they are beside. The numbers in
    ``state_dict.pth``, such as learning rates, count as tensors.
    """
    found: dict[str, torch.Tensor] = {}

    def collect(value: Any, place: str) -> None:
        if isinstance(value, torch.Tensor):
            found[place] = value
        elif isinstance(value, (int, float)) and place.startswith("state_dict.pth"):
            found[place] = torch.tensor(value, dtype=torch.float64)
        elif isinstance(value, dict):
            for key, item in value.items():
                collect(item, f"{place}/{key}")
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                collect(item, f"{place}/{index}")

    for path in sorted([*folder.rglob("*.pt"), *folder.rglob("*.pth")]):
        collect(Reader(trusted=True).load(path), str(path.relative_to(folder)))
    return found


def stored_tensors(
    config: ExperimentConfig, uuid: str | None, folder: Path
) -> dict[str, torch.Tensor]:
    """The `tensors` of a checkpoint in a local storage, which is copied into `folder`."""
    root = Path(config.checkpoint_storage.url.removeprefix("file://"))
    for file in CheckpointStore(config.checkpoint_storage.url).open(str(uuid)).files:
        copied = folder / file.checked_path
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / layout.file_key(*file.place(str(uuid))), copied)
    return tensors(folder)


def differing(expected: dict[str, torch.Tensor], seen: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that only one side has, or that differ."""
    odd = sorted(expected.keys() ^ seen.keys())
    return odd + [n for n in expected.keys() & seen.keys() if not torch.equal(expected[n], seen[n])]
