"""Runs of `Trainer.fit` for ``fit_toy.py``, and what they leave behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.slots import lines
from tests.support.tensors import differing, tensors
from trial_core.checkpoint.store import CheckpointStore


def run(folder: Path, fit: dict[str, Any], **hparams: Any) -> dict[str, Any]:
    """A run whose records and checkpoints go below `folder`, judged by the loss."""
    folder.mkdir(parents=True, exist_ok=True)
    exp_conf = {
        "name": "toy", "searcher": {"metric": "loss"},
        "checkpoint_storage": f"file://{folder}/checkpoints",
    }  # fmt: skip
    return {
        "init": {"hparams": {"record": str(folder), **hparams}, "exp_conf": exp_conf},
        "fit": fit,
    }


def every(batches: int, length: int) -> dict[str, Any]:
    """The arguments of a fit that reports every so many batches."""
    return {"max_length": {"batches": length}, "reporting_period": {"batches": batches}}


def store(folder: Path) -> CheckpointStore:
    return CheckpointStore(f"file://{folder}/checkpoints")


def files(folder: Path, uuid: str) -> Path:
    """The files of a checkpoint."""
    return folder / "checkpoints" / "checkpoints" / uuid


def hooks(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    """What a rank's callback has recorded."""
    return lines(folder, "hooks", rank)


def assert_same_end(
    straight: Path, parts: Path, whole: list[dict[str, Any]], rest: list[dict[str, Any]]
) -> None:
    """Two runs have seen the same micro-batches on every rank, and end with the same weights,
    optimizer states, random states and metrics, bit for bit.

    Args:
        straight: the folder of one run.
        parts: that of the other, in several parts.
        whole: what came of the first, on each rank.
        rest: what came of the other's last part.
    """
    for rank in range(len(whole)):
        assert lines(parts, "samples", rank) == lines(straight, "samples", rank)
    assert rest[0]["validation_metrics"] == whole[0]["validation_metrics"]
    expected = tensors(files(straight, whole[0]["checkpoint_uuid"]))
    assert len(expected) > 7
    assert differing(expected, tensors(files(parts, rest[0]["checkpoint_uuid"]))) == []
