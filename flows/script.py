"""The stages of a Core API script's run, in place of `follow_schedule`.

A trial is asked: the sequencer decides what its ranks do next. A script decides itself, and tells
the driver. So there is no schedule to follow here::

    fetch the resume point
    until the script has ended:
        run the script until it stores a checkpoint    it waits for the upload
        upload and commit

Slots, restarts, stops, checkpoints and the report are those of every run.
"""

from __future__ import annotations

from trial_core.config.lengths import OPEN_END
from trial_core.messages import CheckpointWritten, RunScript
from trial_core.run.choose_resume_point import fetch_first_intact
from trial_core.run.run_loop import RunStages, TrialResult
from trial_core.run.script_progress import ScriptProgress
from trial_core.transfer.staged_checkpoint import StagedCheckpoint
from trial_core.units import Batch
from trialflow.tasks.run_script import RunningScript, run_script
from trialflow.tasks.trial_run import TrialRun


def follow_script(run: TrialRun, stages: RunStages) -> TrialResult:
    """Run the script of a trial on its ranks, to its end.

    Raises:
        RankFailed: the script raised, or exited with another code than 0.
        CheckpointError: a checkpoint of the script could not be stored.
    """
    start = fetch_first_intact(stages.resume_points(), stages.fetch)
    if start.checkpoint is not None:
        stages.logger.info("the script starts from checkpoint %s", start.uuid)
    stages.metrics.clear()  # of steps that were lost with earlier ranks
    stages.metrics.update(start.metrics)
    searcher, begin = run.config.searcher, start.progress.batches_trained
    progress = ScriptProgress(
        searcher.metric, searcher.smaller_is_better, start.progress, stages.metrics
    )
    run.batches_trained = begin
    run.clock.starts_at(begin)
    run.end = _length(run)
    run.observer.run_started(run.trial, run.end, begin, run.batch_samples)
    run.can_save = True
    if run.moves:
        run.slots.stop()
    script = RunningScript(run, RunScript(checkpoint=start.uuid, batches_trained=begin))
    script.start()
    while True:
        event = run_script(run, script, progress, run.batches_trained)
        if not isinstance(event, CheckpointWritten):
            break
        run.batches_trained, run.has_trained = event.steps_completed, True
        at = progress.stored(event.steps_completed)
        staged = StagedCheckpoint.now(event.uuid, at, progress.metrics, _folders(run, event.uuid))
        stages.start_upload(staged)
        stages.finish_upload()  # the script waits, too
        run.has_saved(event.steps_completed)
    run.writes_run_files = any(rank.writes_run_files for rank in event)
    stages.finish(run.batches_trained)
    newest = stages.newest_checkpoint or (start.uuid if start.restore == "everything" else None)
    return TrialResult(
        trial=run.trial,
        batches_trained=run.batches_trained,
        stopped_early=any(rank.was_preempted for rank in event),
        training_metrics=progress.metrics.get("training", {}),
        validation_metrics=progress.metrics.get("validation", {}),
        validated_at=progress.progress.validated_at,
        checkpoint_uuid=newest,
        checkpoint_url=run.store.files_url(newest) if newest else None,
    )


def _length(run: TrialRun) -> int:
    """How many steps the experiment announces; 0: it does not."""
    length = run.config.searcher.max_length
    if length == OPEN_END or not isinstance(length, Batch):
        return 0
    return length.value if isinstance(length.value, int) else 0


def _folders(run: TrialRun, uuid: str) -> tuple[str, ...]:
    """Each rank's staging folder, if the driver uploads; ranks that wrote nothing have one, too."""
    if not run.store.is_process_local:
        return ()
    ranks = range(run.slots.world_size)
    folders = [run.run_dir / "staging" / uuid / f"rank-{rank}" for rank in ranks]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    return tuple(map(str, folders))
