"""A script's run, with stages that have nothing to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.slots import toy_config
from trial_core.checkpoint.resume_point import ResumePoint
from trial_core.checkpoint.store import CheckpointStore
from trial_core.driver.follow_script import follow_script
from trial_core.driver.run import Launch, Run
from trial_core.driver.stages import PLAIN_STAGES
from trial_core.driver.uploads import Uploads
from trial_core.schedule.sequencer import Progress


def test_a_resumed_script_begins_where_it_was(tmp_path: Path) -> None:
    """From there on the periods of the user's own stages are counted."""
    run = Run(toy_config(tmp_path), "toy-0a", tmp_path, CheckpointStore(f"file://{tmp_path}"))
    run.choose_resume_points = lambda: [ResumePoint(Progress(batches_trained=8))]
    launch = Launch(run)
    slots: Any = SimpleNamespace(request=lambda *_, **__: [])
    launch.slots = slots
    stages = replace(PLAIN_STAGES, run_script=lambda *_: [])
    with Uploads(launch, stages) as uploads:
        result = follow_script(launch, stages, uploads)
    assert (launch.status.began_at, result.batches_trained) == (8, 8)
