"""Writes a checkpoint's fingerprint of one weight, without an engine."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from trial_core.deepspeed.fingerprints import FILE_PREFIX
from trial_core.rank.state_files.bit_sum import bit_sum


def write_fingerprint(folder: Path, name: str, weight: torch.Tensor) -> None:
    """Record `weight` as the one that engine 0 had when the checkpoint was saved."""
    tensors = {name: [str(weight.dtype), weight.numel(), int(bit_sum(weight))]}
    file = folder / f"{FILE_PREFIX}00000.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"version": 1, "engines": [{"model_rank": 0, "tensors": tensors}]}))
