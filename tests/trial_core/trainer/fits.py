"""Runs of `Trainer.fit` for ``fit_toy.py``, and their results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.slots import lines
from tests.support.tensors import differing, tensors
from trial_core.checkpoint.store import CheckpointStore


def run(folder: Path, fit: dict[str, Any], **hparams: Any) -> dict[str, Any]:
    """A run with its records and checkpoints below `folder`, and loss as the searcher metric."""
    folder.mkdir(parents=True, exist_ok=True)
    exp_conf = {
        "name": "toy", "searcher": {"metric": "loss"},
        "checkpoint_storage": f"file://{folder}/checkpoints", "tensorboard_logging": False,
    }  # fmt: skip
    return {
        "init": {"hparams": {"record": str(folder), **hparams}, "exp_conf": exp_conf},
        "fit": fit,
    }


def every(batches: int, length: int) -> dict[str, Any]:
    """The arguments of a fit of `length` batches that reports every `batches`."""
    return {"max_length": {"batches": length}, "reporting_period": {"batches": batches}}


def store(folder: Path) -> CheckpointStore:
    return CheckpointStore(f"file://{folder}/checkpoints")


def files(folder: Path, uuid: str) -> Path:
    """The files of a checkpoint."""
    return folder / "checkpoints" / "checkpoints" / uuid


def hooks(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    """The hook calls that a rank's callback has recorded."""
    return lines(folder, "hooks", rank)


def assert_same_end(
    straight: Path, parts: Path, whole: list[dict[str, Any]], rest: list[dict[str, Any]]
) -> None:
    """Check that a resumed run equals an uninterrupted one, bit for bit.

    Micro-batches, weights, optimizer states, random states and metrics.

    Args:
        straight, parts: the folders of the uninterrupted and of the resumed run.
        whole, rest: each rank's result of the uninterrupted run, and of the last resumed part.
    """
    for rank in range(len(whole)):
        assert lines(parts, "samples", rank) == lines(straight, "samples", rank)
    assert rest[0]["validation_metrics"] == whole[0]["validation_metrics"]
    expected = tensors(files(straight, whole[0]["checkpoint_uuid"]))
    assert len(expected) > 7
    assert differing(expected, tensors(files(parts, rest[0]["checkpoint_uuid"]))) == []
