"""A run that pauses its trial at a length, and one that trains it further from there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.driving import drive
from tests.support.slots import TOY, toy_config
from tests.support.tensors import differing, stored_tensors
from trial_core.schedule.units import Batch

pytestmark = pytest.mark.slots

KINDS: dict[str, dict[str, Any]] = {
    "deepspeed": {},
    "pytorch": {
        "entrypoint": "pytorch_trials:Small",
        "hyperparameters": {
            "global_batch_size": 4,
            "train_samples": 22,
            "validation_samples": 4,
            "shuffle": True,
        },
    },
}


@pytest.mark.parametrize("slots", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("warm_home")
def test_a_paused_trial_is_the_uninterrupted_one(tmp_path: Path, kind: str, slots: int) -> None:
    """Bit for bit, in the middle of an epoch and of a train-workload."""
    changes = {"resources": {"slots_per_trial": slots}, **KINDS[kind]}
    config = toy_config(tmp_path, 9, scheduling_unit=4, **changes)
    whole = drive(config, "toy-00000000000a")
    first = drive(config, "toy-00000000000b", pause_at=Batch(3))
    assert (first.batches_trained, first.validated_at, first.checkpoint_at) == (3, 3, 3)
    assert first.stopped_early
    assert first.stop_reason == "it waits at 3 batches"
    second = drive(config, "toy-00000000000b", pause_at=Batch(9))
    assert (second.batches_trained, second.stopped_early, second.stop_reason) == (9, False, None)
    expected = stored_tensors(config, whole.checkpoint_uuid, tmp_path / "whole")
    seen = stored_tensors(config, second.checkpoint_uuid, tmp_path / "paused")
    assert expected
    assert differing(expected, seen) == []
    assert second.validation_metrics == whole.validation_metrics


OPERATIONS = """
import trial_core
from trial_core import core

with core.init() as context:
    latest = context.info.latest_checkpoint
    step = 0
    if latest is not None:
        step = context.checkpoint.get_metadata(latest)["steps_completed"]
    for operation in context.searcher.operations():
        while step < operation.length:
            step += 1
        context.train.report_validation_metrics(step, {"loss": 1 / step})
        with context.checkpoint.store_path({"steps_completed": step}) as (path, _):
            (path / "state").write_text(str(step))
        operation.report_completed(1 / step)
"""


@pytest.mark.parametrize(
    ("entrypoint", "pause", "reaches"),
    [
        ("python operations.py", Batch(4), 4),
        pytest.param("python core_script.py 9", Batch(2), 3, marks=pytest.mark.long),
        pytest.param("python trainer_script.py 0", Batch(3), 3, marks=pytest.mark.long),
    ],
)
@pytest.mark.usefixtures("warm_home")
def test_a_script_pauses_too(tmp_path: Path, entrypoint: str, pause: Batch, reaches: int) -> None:
    """It learns it from `operations`, from `should_preempt` once it has validated, or in `fit`."""
    code = tmp_path / "code"
    shutil.copytree(TOY, code)
    (code / "operations.py").write_text(OPERATIONS)
    config = toy_config(
        tmp_path, 9, code=str(code), entrypoint=entrypoint, resources={"slots_per_trial": 1},
        hyperparameters={"record": str(tmp_path), "store_every": 3},
    )  # fmt: skip
    first = drive(config, "toy-00000000000b", pause_at=pause)
    assert (first.batches_trained, first.checkpoint_at) == (reaches, reaches)
    assert first.stopped_early
    assert first.stop_reason == f"it waits at {pause.value} batches"
    second = drive(config, "toy-00000000000b")
    assert (second.batches_trained, second.stopped_early, second.stop_reason) == (9, False, None)


@pytest.mark.usefixtures("warm_home")
def test_a_script_that_ends_before_the_pause_does_not_wait_there(tmp_path: Path) -> None:
    """It has ended by itself, with what it has reached."""
    config = toy_config(
        tmp_path, 9, entrypoint="python core_script.py 3", resources={"slots_per_trial": 1},
        hyperparameters={"record": str(tmp_path), "store_every": 3},
    )  # fmt: skip
    result = drive(config, "toy-00000000000b", pause_at=Batch(4))
    assert (result.batches_trained, result.validated_at) == (3, 3)
    assert (result.stopped_early, result.stop_reason) == (False, None)
