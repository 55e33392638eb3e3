"""The examples' trials, for ranks that work in this folder."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "examples" / "digits"))

import deepspeed_trial as digits_deepspeed
import pytorch_trial as digits_pytorch

__all__ = ["digits_deepspeed", "digits_pytorch"]
