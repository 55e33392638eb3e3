"""The story of a fit where something is wrong with the user's files; its ranks are made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trial_core.checkpoint.manifest import Topology
from trial_core.checkpoint.resume_point import ResumePoint
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config.script import script_config
from trial_core.context import RunInfo
from trial_core.distributed import DistributedContext
from trial_core.errors import CheckpointError, TrialError
from trial_core.messages import (
    HookDone,
    LoadersBuilt,
    Persisted,
    Saved,
    Trained,
    TrialBuilt,
    Validated,
)
from trial_core.run.sequencer import Schedule
from trial_core.trainer.fit_loop import follow_schedule
from trial_core.trainer.fit_stages import FitStages
from trial_core.units import Batch


class Told:
    """A controller that does nothing, and remembers what it was told to do.

    Args:
        mistake: what it says of each checkpoint that it is to persist.
    """

    def __init__(self, mistake: str | None = None) -> None:
        self.mistake = mistake
        self.did: list[str] = []

    def build_loaders(self, request: Any) -> LoadersBuilt:
        return LoadersBuilt(epoch=None)

    def train(self, request: Any) -> Trained:
        self.did.append(f"train until {request.until}")
        return Trained(batches_trained=request.until, metrics={}, seconds=1.0, stop_requested=False)

    def validate(self, request: Any) -> Validated:
        self.did.append("validate")
        return Validated(metrics={"loss": 0.5}, seconds=1.0, stop_requested=False)

    def save_checkpoint(self, request: Any) -> Saved:
        self.did.append("save")
        return Saved(staging="", seconds=1.0)

    def persist_checkpoint(self, request: Any) -> Persisted:
        return Persisted(files=[], seconds=1.0, mistake=self.mistake)

    def run_hook(self, request: Any) -> HookDone:
        self.did.append(request.hook)
        return HookDone(stop_requested=False)

    def release_staging(self, request: Any) -> None: ...

    def finish_run_files(self, request: Any) -> None: ...

    def close(self) -> None: ...


def run(folder: Path, told: Told, metric: str, every: int = 3, **schedule: Any) -> None:
    """Fit 7 batches, validated every 3 unless it says otherwise."""
    topology = Topology(world_size=1, data_parallel_size=1)
    hooks = ["on_validation_end", "on_checkpoint_upload_end", "on_trial_shutdown"]
    built = TrialBuilt(hooks=hooks, topology=topology, batch_samples=1, versions={})
    controller: Any = told
    fit = FitStages(
        controller,
        built,
        RunInfo("toy-0000beef", {}),
        DistributedContext.from_environment({}),
        CheckpointStore(f"file://{folder}/checkpoints"),
        script_config({}),
        metric,
        test_mode=False,
    )
    period = Batch(every)
    follow_schedule(
        fit, Schedule(Batch(7), Batch(7), validation_period=period, **schedule), [ResumePoint()]
    )


def test_a_metric_that_nobody_reports_costs_no_training(tmp_path: Path) -> None:
    """Found at the first validation: what was trained by then is saved, the trial is shut down,
    and then the mistake is told."""
    told = Told()
    with pytest.raises(TrialError, match=r'searcher.metric "accuracy" is not among .*: loss$'):
        run(tmp_path, told, "accuracy")
    assert told.did == [
        "train until 3",
        "validate",
        "on_validation_end",
        "save",
        "on_checkpoint_upload_end",
        "on_trial_shutdown",
    ]
    (manifest,) = CheckpointStore(f"file://{tmp_path}/checkpoints").list()
    # Not validated, as far as the one who goes on is concerned: judged once the name is right.
    assert (manifest.progress.batches_trained, manifest.progress.validated_at) == (3, None)


def test_before_any_training_there_is_nothing_to_save(tmp_path: Path) -> None:
    """step_zero_validation finds the mistake at once."""
    told = Told()
    with pytest.raises(TrialError, match="is not among the validation metrics"):
        run(tmp_path, told, "accuracy", step_zero_validation=True)
    assert told.did == ["validate", "on_validation_end", "on_trial_shutdown"]


def test_files_that_no_checkpoint_can_have_end_the_fit(tmp_path: Path) -> None:
    """The rank's message is raised, at once: to store them again would end the same way."""
    told = Told(mistake="rank 0 saved a file 'odd': use another name")
    with pytest.raises(CheckpointError, match=r"rank 0 saved a file 'odd': use another name$"):
        run(tmp_path, told, "loss")
