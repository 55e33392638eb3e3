"""A script's run, with stages that have nothing to do."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.slots import toy_config
from tests.support.stages import faking
from trial_core.checkpoint.resume_point import ResumePoint
from trial_core.checkpoint.store import CheckpointStore
from trial_core.driver.follow_script import follow_script
from trial_core.driver.run import Launch, Run
from trial_core.driver.uploads import Uploads
from trial_core.schedule.sequencer import Progress


def test_a_resumed_script_begins_where_it_was(tmp_path: Path) -> None:
    """From there on the periods of the user's own stages are counted."""
    run = Run(toy_config(tmp_path), "toy-0a", tmp_path, CheckpointStore(f"file://{tmp_path}"))
    run.choose_resume_points = lambda *_: iter([ResumePoint(Progress(batches_trained=8))])
    launch = Launch(run)
    slots: Any = SimpleNamespace(request=lambda *_, **__: [])
    launch.slots = slots
    run.execute = faking(run_script=lambda *_: [])
    with Uploads(launch) as uploads:
        result = follow_script(launch, uploads)
    assert (launch.status.began_at, result.batches_trained) == (8, 8)
