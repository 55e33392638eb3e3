"""A fit that was taken for dead: another run goes on with its trial, and it saves no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trial_core.trainer.test_fit_loop import Told
from trial_core.checkpoint.manifest import Topology
from trial_core.checkpoint.resume_point import ResumePoint
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config.script import script_config
from trial_core.context import RunInfo
from trial_core.distributed import DistributedContext
from trial_core.errors import Superseded
from trial_core.messages import HookDone, TrialBuilt
from trial_core.run.sequencer import Schedule
from trial_core.trainer.fit_loop import follow_schedule
from trial_core.trainer.fit_stages import FitStages
from trial_core.units import Batch

TRIAL = "toy-0000beef"


class TakenOver(Told):
    """Another run takes the trial over as soon as a checkpoint is committed."""

    def __init__(self, store: CheckpointStore) -> None:
        super().__init__()
        self.store = store

    def run_hook(self, request: Any) -> HookDone:
        if request.hook == "on_checkpoint_upload_end":
            self.store.take_over(TRIAL, "another")
        return super().run_hook(request)


def test_a_fit_that_is_superseded_ends(tmp_path: Path) -> None:
    """What it had committed before is kept; the next checkpoint is refused, which ends it."""
    store = CheckpointStore(f"file://{tmp_path}/checkpoints")
    told = TakenOver(store)
    controller: Any = told
    fit = FitStages(
        controller,
        TrialBuilt(
            hooks=["on_checkpoint_upload_end"],
            topology=Topology(world_size=1, data_parallel_size=1),
            batch_samples=1,
            versions={},
        ),
        RunInfo(TRIAL, {}),
        DistributedContext.from_environment({}),
        store,
        script_config({}),
        "loss",
        test_mode=False,
        fence=store.take_over(TRIAL, "this one"),
    )
    every = Batch(3)
    schedule = Schedule(Batch(9), every, validation_period=every, checkpoint_period=every)
    with pytest.raises(Superseded, match=r"attempt another, by .* this is attempt this one"):
        follow_schedule(fit, schedule, [ResumePoint()])
    (manifest,) = store.list()
    assert (manifest.progress.batches_trained, manifest.attempt) == (3, "this one")
