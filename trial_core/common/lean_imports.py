"""Keeps DeepSpeed's autotuner from importing MLflow, which takes as long as importing PyTorch.

DeepSpeed imports its autotuner, and that MLflow where it is installed, although no rank tunes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType

AUTOTUNER = "deepspeed.autotuning.autotuner"


class _NoMlflowForTheAutotuner(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "mlflow" and _importer() == AUTOTUNER:
            raise ModuleNotFoundError("no rank tunes", name=fullname)
        return None


def _importer() -> str:
    """The name of the module that imports, seen from a finder."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("importlib."):
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__"))


def install() -> None:
    """Call once, before DeepSpeed is imported."""
    sys.meta_path.insert(0, _NoMlflowForTheAutotuner())
