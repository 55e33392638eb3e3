"""What is told of a stage that fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.slots import toy_config
from trial_core.checkpoint.store import CheckpointStore
from trial_core.driver.run import Launch, Run
from trial_core.driver.stages.declared_stage import OwnStageFailed, stage
from trial_core.errors import CheckpointNotFound, CheckpointRefused, TrialflowError
from trial_core.observe.events.observers import Observer
from trial_core.observe.events.run_status import RunStatus


class Display(RunStatus, Observer):
    """The status of a run, as a display keeps it."""


@pytest.mark.parametrize("error", [CheckpointRefused, CheckpointNotFound, OwnStageFailed])
def test_a_failed_stage_does_not_stay_in_view(tmp_path: Path, error: type[TrialflowError]) -> None:
    """A script goes on after a refused upload, a run after the fetch of a deleted checkpoint."""

    @stage("checkpoint-upload", "@{at}", bucket=None)
    def fails(launch: Launch, at: int) -> None:
        raise error("for a test")

    display = Display()
    store = CheckpointStore(f"file://{tmp_path}")
    launch = Launch(Run(toy_config(tmp_path), "toy-0a", tmp_path, store, observer=display))
    with pytest.raises(error):
        fails(launch, 4)
    assert display.stage.name == "starting"
