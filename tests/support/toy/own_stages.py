"""Stages of a user's own, for tests: module:function of an experiment's `stages`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from prefect import task

BEST_AT = 8


def _record(argument: dict[str, Any], name: str) -> Path:
    return Path(argument["config"]["hyperparameters"]["record"]) / name


def score(argument: dict[str, Any]) -> dict[str, float]:
    """Greatest at batch `BEST_AT`."""
    assert argument["after"] == "validate"
    assert "loss" in argument["validation_metrics"]
    return {"score": float(-abs(argument["batches_trained"] - BEST_AT)), "loss": 7.0, "more": 1.0}


@task
def note(argument: dict[str, Any]) -> None:
    """Write what it is called with. A Prefect task."""
    print("noting", argument["batches_trained"])
    with _record(argument, "notes").open("a") as file:
        file.write(json.dumps(argument) + "\n")


def fail(argument: dict[str, Any]) -> None:
    """Fail the first two times."""
    tries = _record(argument, "tries")
    tries.open("a").write("x")
    if tries.stat().st_size < 3:
        raise RuntimeError("no room for samples")


def hang(argument: dict[str, Any]) -> None:
    """Run until it is killed, the first time."""
    hangs = _record(argument, "hangs")
    if not hangs.exists():
        hangs.touch()
        time.sleep(3600)


def await_hang(argument: dict[str, Any]) -> None:
    """Return once `hang` runs; it is called after the validation before."""
    while argument["batches_trained"] > 4 and not _record(argument, "hangs").exists():
        time.sleep(0.01)


def hold(argument: dict[str, Any]) -> None:
    """Read the first checkpoint only once others have been committed."""
    while not _record(argument, "released").exists():
        time.sleep(0.01)
    manifest = Path(argument["checkpoint"]["url"].removeprefix("file://"))
    with _record(argument, "held").open("a") as file:
        file.write(f"{argument['batches_trained']} {manifest.exists()}\n")
