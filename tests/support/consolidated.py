"""Reads a checkpoint's parameters with DeepSpeed's own converter, for any topology."""

from __future__ import annotations

import contextlib
import io
from argparse import Namespace
from pathlib import Path

import torch
from deepspeed.checkpoint.ds_to_universal import main


def consolidated(folder: Path, into: Path) -> dict[str, torch.Tensor]:
    """fp32 weights and both of Adam's moments, by ``parameter/kind``.

    Args:
        folder: the files under an engine's tag.
        into: an empty folder to work in.
    """
    log = io.StringIO()
    with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        main(
            Namespace(
                input_folder=str(folder), output_folder=str(into), num_extract_workers=1,
                num_merge_workers=1, keep_temp_folder=False, strict=True,
                inject_missing_state=True,
            )
        )  # fmt: skip
    found = {}
    for path in sorted((into / "zero").rglob("*.pt")):
        if path.stem in ("fp32", "exp_avg", "exp_avg_sq"):
            state = torch.load(path, weights_only=False)
            tensor = state["param"] if isinstance(state, dict) else state
            found[f"{path.parent.name}/{path.stem}"] = tensor.flatten()  # ZeRO-3's are flat
    return found
