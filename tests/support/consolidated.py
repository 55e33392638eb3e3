"""Reads a checkpoint's parameters: with DeepSpeed's own converter, and as an export does."""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
from argparse import Namespace
from pathlib import Path

import torch
from deepspeed.checkpoint.ds_to_universal import main

from trial_core.checkpoint.weights.weights import Precision, Weights, read_all
from trial_core.deepspeed.checkpoint_engine import CHECKPOINT_CLASSES
from trial_core.deepspeed.export.deepspeed_folder import join_frozen
from trial_core.deepspeed.export.engine_weights import saved_weights
from trial_core.deepspeed.fingerprints import check_exported, fingerprints_of
from trial_core.rank.state_files.safe_load import Reader


def consolidated(folder: Path, into: Path) -> dict[str, torch.Tensor]:
    """fp32 weights and both of Adam's moments, by ``parameter/kind``.

    Args:
        folder: the files under an engine's tag.
        into: an empty folder to work in.
    """
    log = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as copied,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        plain = shutil.copytree(folder, Path(copied, "plain"))
        join_frozen(plain, Reader(trusted=True))
        main(
            Namespace(
                input_folder=str(plain), output_folder=str(into), num_extract_workers=1,
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


def export_weights(
    folder: Path, engine: int = 0, dtype: Precision = "fp32", reader: Reader | None = None
) -> Weights:
    """All weights that an export has, in memory, compared with their fingerprints together."""
    reader = reader or Reader(classes=CHECKPOINT_CLASSES)
    weights = read_all(saved_weights(folder, engine, dtype, reader))
    check_exported(fingerprints_of(folder, engine), weights)
    return weights
