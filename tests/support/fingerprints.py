"""Writes a checkpoint's fingerprint of one weight, without an engine."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from trial_core.deepspeed.fingerprints import FILE_PREFIX
from trial_core.rank.state_files.bit_sum import bit_sum


def write_fingerprint(folder: Path, name: str, weight: torch.Tensor) -> None:
    """Record `weight` as the one that engine 0 had when the checkpoint was saved."""
    count, bits = weight.numel(), int(bit_sum(weight))
    tensors = {name: [str(weight.dtype), count, 0, count, bits, bits]}
    file = folder / f"{FILE_PREFIX}00000.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"version": 2, "engines": [{"model_rank": 0, "tensors": tensors}]}))
