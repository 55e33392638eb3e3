"""Checkpoints whose weights are copied while the next batch computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.driving import drive
from tests.support.fitting import fit_toys
from tests.support.slots import toy_config
from tests.support.tensors import differing, stored_tensors
from tests.trial_core.driver.test_pausing import KINDS
from tests.trial_core.trainer.fits import every, run, store
from trial_core.checkpoint.store import CheckpointStore

pytestmark = pytest.mark.slots

LONG = pytest.mark.long
PYTORCH = KINDS["pytorch"]
FSDP2 = {**PYTORCH, "optimizations": {"sharding": "fsdp2"}}


BUFFERS = {
    "entrypoint": "engine_trials:RankBuffers",
    "hyperparameters": {"accumulation": 2, "ds_config": {"zero_optimization": {"stage": 1}}},
}
"""Each forward pass changes its running means, of which fingerprints are recorded, too."""


def of_stage(stage: int) -> dict[str, Any]:
    return {"hyperparameters": {"zero_stage": stage}}


@pytest.mark.parametrize(
    ("changes", "slots"),
    [
        pytest.param(BUFFERS, 2, id="zero 1", marks=LONG),
        pytest.param(PYTORCH, 1, id="pytorch"),
        pytest.param(of_stage(0), 1, id="zero 0", marks=LONG),
        pytest.param(of_stage(2), 2, id="zero 2", marks=LONG),
        pytest.param(of_stage(3), 2, id="zero 3", marks=LONG),
        pytest.param(FSDP2, 2, id="fsdp2", marks=LONG),
    ],
)
@pytest.mark.usefixtures("warm_home")
def test_checkpoints_are_the_same_when_weights_are_copied_later(
    tmp_path: Path, changes: dict[str, Any], slots: int
) -> None:
    """File by file, byte for byte, though the next batch has begun."""
    stored = {}
    for snapshot in ("lazy", "eager"):
        place = {"type": "shared_fs", "host_path": str(tmp_path / snapshot), "save_trial_latest": 9}
        config = toy_config(
            tmp_path / snapshot, 4, scheduling_unit=1, min_checkpoint_period={"batches": 1},
            checkpointing={"snapshot": snapshot, "verify_first": False},
            resources={"slots_per_trial": slots}, **changes,
            checkpoint_storage=place,
        )  # fmt: skip
        drive(config)
        manifests = CheckpointStore(config.checkpoint_storage.url).list()
        stored[snapshot] = {
            (manifest.progress.batches_trained, entry.path): entry.digest
            for manifest in manifests
            for entry in manifest.all_files
        }
    assert {batches for batches, _ in stored["eager"]} == {1, 2, 3, 4}
    assert stored["lazy"] == stored["eager"]


@pytest.mark.parametrize(("slots", "stage"), [(1, 0), pytest.param(2, 2, marks=LONG)])
@pytest.mark.usefixtures("warm_home")
def test_weights_that_change_while_they_are_copied_cost_one_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, slots: int, stage: int
) -> None:
    """It is not stored; the same ranks save again, and train no batch twice. The result is that of
    an undisturbed run."""
    stored, batches, warnings = [], [], []
    for trial in ("damaging_trials:ChangesWhileCopying", "toy_trial:ToyTrial"):
        folder = tmp_path / trial.partition(":")[0]
        place = {"type": "shared_fs", "host_path": str(folder), "save_trial_latest": 9}
        config = toy_config(
            folder, 4, scheduling_unit=1, min_checkpoint_period={"batches": 1}, max_restarts=0,
            checkpointing={"verify_first": False}, resources={"slots_per_trial": slots},
            entrypoint=trial, checkpoint_storage=place, **of_stage(stage),
        )  # fmt: skip
        caplog.clear()
        result = drive(config)
        warnings.append(caplog.text.count("the checkpoint at batch 2 is not stored"))
        manifests = CheckpointStore(config.checkpoint_storage.url).list()
        batches.append(sorted(each.progress.batches_trained for each in manifests))
        stored.append(stored_tensors(config, result.checkpoint_uuid, folder / "files"))
    assert warnings == [1, 0]
    assert batches[1] == [1, 2, 3, 4]
    assert batches[0] == [1, 3, 4]
    assert stored[0]
    assert differing(*stored) == []


@LONG
def test_a_script_is_not_ended_by_weights_that_change_while_they_are_copied(tmp_path: Path) -> None:
    """Its ranks cannot be launched again."""
    given = run(tmp_path, {**every(1, 4), "checkpoint_period": {"batches": 1}})
    given["init"]["exp_conf"]["checkpointing"] = {"verify_first": False}
    del given["init"]["hparams"]["record"]  # a hook that follows each save
    ((result,),) = fit_toys(
        "python", tmp_path / "launch", {"trial": "damaging_trials:ChangesWhileCopying", **given},
        ranks=1,
    )  # fmt: skip
    assert result["checkpoint_at"] == 4
    assert {1, 2, 3, 4} - {each.progress.batches_trained for each in store(tmp_path).list()} == {2}
