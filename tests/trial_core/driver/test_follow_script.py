"""A script's run, with stages that have nothing to do."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.manifests import new_manifest
from tests.support.slots import toy_config
from tests.support.stages import faking
from trial_core.checkpoint.resume_point import ResumePoint
from trial_core.checkpoint.store import CheckpointStore
from trial_core.driver.follow_script import follow_script
from trial_core.driver.run import Launch, Run
from trial_core.driver.stages.script import ScriptReports
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


def test_a_resumed_script_does_not_compare_with_another_metrics_best(tmp_path: Path) -> None:
    """Neither the driver, nor the script that is told the best value."""
    run = Run(toy_config(tmp_path), "toy-0a", tmp_path, CheckpointStore(f"file://{tmp_path}"))
    told: list[str] = []
    seen: list[float | None] = []

    def run_script(_: Any, __: Any, reports: ScriptReports, ___: int) -> list[Any]:
        seen.append(reports.progress.best_metric)
        return []

    launch = Launch(run)
    slots: Any = SimpleNamespace(request=lambda *_, **__: [])
    launch.slots = slots
    run.execute = faking(run_script=run_script, fetch_checkpoint=lambda *_: None)
    run.observer.notice = told.append  # type: ignore[assignment, method-assign]
    for metric in ("accuracy", "loss"):
        config = {**run.config.digested()}
        config["searcher"] = {**config["searcher"], "metric": metric}
        saved = new_manifest(8, progress=Progress(8, best_metric=0.1), config=config)
        run.choose_resume_points = lambda *_, saved=saved: iter([ResumePoint.continuing(saved)])
        with Uploads(launch) as uploads:
            follow_script(launch, uploads)
    assert seen == [None, 0.1]
    assert [text for text in told if "The best value so far does not count" in text] == told[1:2]
