"""The run loop, with stages that only record what is asked of them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.support.manifests import new_manifest
from trial_core.checkpoint.resume_point import ResumePoint
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.staged_checkpoint import StagedCheckpoint
from trial_core.driver.run_loop import Validation, follow_schedule
from trial_core.errors import CheckpointDamaged, TrialError
from trial_core.schedule.sequencer import Progress, Schedule
from trial_core.schedule.units import Batch, EpochLength

MISTAKE = TrialError("the metric is not reported")


class RecordedStages:
    """`RunStages` that record their calls. Every validation gives a better metric.

    Attributes:
        upload_is_slow: whether an upload ends only when it is waited for.
        uploads_until: an upload also ends once so many batches are trained.
        stops_at: the run should stop once so many batches are trained.
        mistake: raised in place of the searcher metric.
        metric, names: of the searcher metric, and of all validation metrics.
        may_add_metrics: whether a callback may add metrics.
        fails_at: the losses are not finite once so many batches are trained, and end the run.
        interrupted_at: the validation after so many batches ends early, and the run should stop.
        points: what the run may resume from.
        damage: of checkpoints, by uuid.
    """

    def __init__(self, folder: Path, **schedule: Any) -> None:
        self.trial = "toy-0000beef"
        self.logger: Any = logging.getLogger("recorded")
        self.store = CheckpointStore(f"file://{folder}")
        self.metrics: dict[str, dict[str, Any]] = {}
        self.newest_checkpoint: str | None = None
        self.is_uploading = False
        self.postpones_when_busy = False
        self.how_to_go_on = "give a greater length"
        self.upload_is_slow = False
        self.uploads_until = 10**6
        self.stops_at = 10**6
        self.interrupted_at: int | None = None
        self.mistake: TrialError | None = None
        self.metric: str | None = None
        self.names: list[str] | None = None
        self.may_add_metrics = False
        self.fails_at = 10**6
        self.saved_at: int | None = None
        self.points: list[ResumePoint] = [ResumePoint()]
        self.damage: dict[str | None, str] = {}
        self.calls: list[str] = []
        self._schedule = Schedule(
            **{"max_length": Batch(6), "reporting_period": Batch(5), **schedule}
        )
        self._trained = 0
        self._pending: str | None = None

    def resume_points(self) -> list[ResumePoint]:
        return self.points

    def fetch(self, point: ResumePoint) -> str | None:
        return self.damage.get(point.uuid)

    def schedule(self, progress: Progress) -> Schedule:
        return self._schedule

    def build_loaders(self, point: ResumePoint) -> EpochLength | None:
        self.calls.append(f"build loaders {point.progress.batches_trained}")
        return None

    def run_hook(self, hook: str, batches_trained: int, **arguments: Any) -> None:
        self.calls.append(" ".join([hook, str(batches_trained), *map(str, arguments.values())]))

    def metric_names(self) -> list[str] | None:
        self.calls.append("name metrics")
        return self.names

    def train(self, begin: int, until: int) -> int:
        self._trained = min(until, max(begin, self.stops_at))
        self.calls.append(f"train {begin} {self._trained}")
        self.is_uploading = self.is_uploading and self._trained < self.uploads_until
        self.metrics["training"] = {"loss": -self._trained}
        return self._trained

    def validate(self, batches_trained: int) -> bool:
        self.calls.append(f"validate {batches_trained}")
        return batches_trained != self.interrupted_at

    def report_validation(self, batches_trained: int) -> Validation:
        self.calls.append(f"report {batches_trained}")
        if self.mistake is not None:
            return Validation(mistake=self.mistake)
        return Validation(metric=-batches_trained)

    def loss_failure(self, batches_trained: int) -> TrialError | None:
        return MISTAKE if batches_trained >= self.fails_at else None

    def withholds_checkpoint(self, batches_trained: int) -> bool:
        return batches_trained >= self.fails_at

    def save(self, progress: Progress) -> StagedCheckpoint:
        self.calls.append(f"save {progress.batches_trained}")
        return StagedCheckpoint.now(f"uuid-{progress.batches_trained}", progress, {})

    def start_upload(self, staged: StagedCheckpoint) -> None:
        assert not self.is_uploading
        self._pending, self.is_uploading = staged.uuid, self.upload_is_slow

    def break_training_after_upload(self) -> None:
        assert self.is_uploading
        self.calls.append("break after upload")

    def finish_upload(self) -> None:
        if self._pending is not None:
            self.calls.append(f"uploaded {self._pending}")
            self.newest_checkpoint, self._pending, self.is_uploading = self._pending, None, False

    def poll(self) -> bool:
        if not self.is_uploading:
            self.finish_upload()
        was_interrupted = f"validate {self.interrupted_at}" in self.calls
        return was_interrupted or self._trained >= self.stops_at

    def finish(self, batches_trained: int, stopped_early: bool) -> None:
        self.calls.append("finish")


def test_stages_and_hooks_in_their_order(tmp_path: Path) -> None:
    """Workloads of 5, validations every 3 and checkpoints every 4 batches, and one at batch 0."""
    stages = RecordedStages(
        tmp_path, validation_period=Batch(3), checkpoint_period=Batch(4), checkpoint_policy="none",
        step_zero_validation=True,
    )  # fmt: skip
    result = follow_schedule(stages)
    assert stages.calls == [
        "on_trial_startup 0 0 None", "build loaders 0", "on_training_start 0",
        "validate 0", "on_validation_end 0", "report 0",
        "train 0 3", "on_training_workload_end 3", "validate 3", "on_validation_end 3", "report 3",
        "train 3 4", "on_training_workload_end 4",
        "save 4", "on_checkpoint_write_end 4", "on_checkpoint_end 4", "uploaded uuid-4",
        "train 4 5", "on_training_workload_end 5",
        "train 5 6", "on_training_workload_end 6", "validate 6", "on_validation_end 6", "report 6",
        "save 6", "on_checkpoint_write_end 6", "on_checkpoint_end 6", "uploaded uuid-6",
        "on_trial_shutdown 6", "finish",
    ]  # fmt: skip
    assert (result.trial, result.batches_trained) == ("toy-0000beef", 6)
    assert not result.stopped_early
    assert result.training_metrics == {"loss": -6}
    assert result.checkpoint_uuid == "uuid-6"
    assert str(result.checkpoint_url).endswith("/checkpoints/uuid-6")


def test_a_run_that_should_stop_saves_and_ends(tmp_path: Path) -> None:
    """It neither trains nor validates any more."""
    stages = RecordedStages(tmp_path)
    stages.stops_at = 2
    result = follow_schedule(stages)
    assert stages.calls[3:] == [
        "train 0 2", "on_training_workload_end 2",
        "save 2", "on_checkpoint_write_end 2", "on_checkpoint_end 2", "uploaded uuid-2",
        "on_trial_shutdown 2", "finish",
    ]  # fmt: skip
    assert result.stopped_early


def test_a_run_whose_losses_fail_saves_nothing_more(tmp_path: Path) -> None:
    """It neither trains nor validates any more, and shuts the trial down."""
    stages = RecordedStages(tmp_path, checkpoint_period=Batch(2), validation_period=Batch(4))
    stages.fails_at = 4
    with pytest.raises(TrialError, match="the metric is not reported"):
        follow_schedule(stages)
    assert stages.calls[3:] == [
        "train 0 2", "on_training_workload_end 2",
        "save 2", "on_checkpoint_write_end 2", "on_checkpoint_end 2", "uploaded uuid-2",
        "train 2 4", "on_training_workload_end 4", "on_trial_shutdown 4", "finish",
    ]  # fmt: skip


def test_a_validation_without_the_searcher_metric_is_repeated(tmp_path: Path) -> None:
    """By a run that continues with a metric that is reported; one that counted is not."""
    seen = []
    for best in (None, 0.5):
        stages = RecordedStages(tmp_path)
        stages.metric = "loss"
        progress = Progress(6, validated_at=6, checkpointed_at=6, best_metric=best)
        metrics = {"validation": {"loss": 0.5}}
        manifest = new_manifest(6, progress=progress, metrics=metrics)
        stages.points = [ResumePoint.continuing(manifest)]
        follow_schedule(stages)
        seen.append("validate 6" in stages.calls)
    assert seen == [True, False]


def test_a_validation_that_ends_early_has_no_hook(tmp_path: Path) -> None:
    """The checkpoint does not count as validated."""
    stages = RecordedStages(tmp_path, validation_period=Batch(4))
    stages.interrupted_at = 4
    assert follow_schedule(stages).stopped_early
    assert "validate 4" in stages.calls
    assert "on_validation_end 4" not in stages.calls


@pytest.mark.parametrize(
    ("step_zero", "calls"),
    [
        (
            False,
            [
                "train 0 5", "train 5 6", "validate 6", "report 6", "save 6", "uploaded uuid-6",
                "finish",
            ],
        ),
        (True, ["validate 0", "report 0", "finish"]),
    ],
)  # fmt: skip
def test_a_missing_searcher_metric_costs_no_training(
    tmp_path: Path, step_zero: bool, calls: list[str]
) -> None:
    """The run saves what it has trained and shuts the trial down before it raises the error."""
    stages = RecordedStages(tmp_path, step_zero_validation=step_zero)
    stages.mistake = MISTAKE
    with pytest.raises(TrialError, match="the metric is not reported"):
        follow_schedule(stages)
    seen = [call for call in stages.calls if not call.startswith("on_")]
    assert seen == ["build loaders 0", *calls]
    assert stages.calls[-2].startswith("on_trial_shutdown")


def test_a_metric_that_no_validation_reports_is_found_before_training(tmp_path: Path) -> None:
    """The trial is shut down; there is nothing to save."""
    stages = RecordedStages(tmp_path)
    stages.metric, stages.names = "accuracy", ["loss", "mean"]
    with pytest.raises(TrialError) as error:
        follow_schedule(stages)
    assert str(error.value) == (
        'searcher.metric "accuracy" is not among the validation metrics that the trial reports: '
        'loss, mean. Set searcher.metric to one of these, or report "accuracy" in the trial\'s '
        "validation"
    )
    assert stages.calls[2:] == [
        "on_training_start 0", "name metrics", "on_trial_shutdown 0", "finish"
    ]  # fmt: skip


def test_a_metric_that_a_callback_may_add_is_only_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run trains; its first validation tells."""
    stages = RecordedStages(tmp_path)
    stages.metric, stages.names, stages.may_add_metrics = "perplexity", ["loss"], True
    with caplog.at_level(logging.WARNING):
        assert follow_schedule(stages).batches_trained == 6
    assert 'searcher.metric "perplexity" is not among' in caplog.text
    assert "or add it in on_validation_end" in caplog.text


@pytest.mark.parametrize("names", [None, ["accuracy"]])
def test_a_run_whose_metric_may_be_reported_trains(tmp_path: Path, names: list[str] | None) -> None:
    """Some trials' metrics are known only after a whole validation."""
    stages = RecordedStages(tmp_path)
    stages.metric, stages.names = "accuracy", names
    assert follow_schedule(stages).batches_trained == 6


@pytest.mark.parametrize("case", ["no metric", "reported before", "validates first", "is over"])
def test_the_metrics_names_are_not_looked_for_in_vain(tmp_path: Path, case: str) -> None:
    """Without a searcher metric, or where a validation has told or tells them first."""
    stages = RecordedStages(tmp_path, step_zero_validation=case == "validates first")
    stages.metric = None if case == "no metric" else "loss"
    reported = {"validation": {"loss": 0.5}} if case == "reported before" else {}
    batches = 6 if case == "is over" else 4
    progress = Progress(batches, validated_at=2 if reported else None)
    manifest = new_manifest(batches, progress=progress, metrics=reported)
    stages.points = [ResumePoint.continuing(manifest)]
    if case in ("no metric", "validates first"):
        stages.points = [ResumePoint()]
    follow_schedule(stages)
    assert "name metrics" not in stages.calls


@pytest.mark.parametrize(("postpones", "saved"), [(True, [4, 9, 12, 13]), (False, [4, 8, 12, 13])])
def test_only_optional_checkpoints_are_postponed_during_an_upload(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, postpones: bool, saved: list[int]
) -> None:
    """With `when_busy: postpone`, until a workload ends after the upload; and so does one then. The
    last checkpoint waits for the upload. Both cases are logged, once."""
    stages = RecordedStages(
        tmp_path, max_length=Batch(13), checkpoint_period=Batch(4), checkpoint_policy="none",
        reporting_period=Batch(3),
    )  # fmt: skip
    stages.upload_is_slow, stages.postpones_when_busy, stages.uploads_until = True, postpones, 9
    with caplog.at_level(logging.INFO, "recorded"):
        follow_schedule(stages)
    assert [call for call in stages.calls if call.startswith("save")] == [
        f"save {batches}" for batches in saved
    ]
    assert stages.calls.count("break after upload") == postpones
    postponed = "the checkpoint at batch 8 is postponed: the last one is still being uploaded"
    assert caplog.messages.count(postponed) == postpones
    waits = caplog.messages.count("training waits: the last checkpoint is still being uploaded")
    assert waits == (0 if postpones else 1)


def test_a_last_checkpoint_is_not_postponed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It waits for the upload before it."""
    stages = RecordedStages(tmp_path, checkpoint_period=Batch(4), checkpoint_policy="none")
    stages.upload_is_slow = stages.postpones_when_busy = True
    with caplog.at_level(logging.INFO, "recorded"):
        follow_schedule(stages)
    assert [call for call in stages.calls if call.startswith("save")] == ["save 4", "save 6"]
    assert "training waits: the last checkpoint is still being uploaded" in caplog.messages


def test_a_continuous_checkpoint_follows_an_upload_and_waits_for_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After each train-workload without an upload; the last one waits. No warning is due."""
    stages = RecordedStages(
        tmp_path, max_length=Batch(9), reporting_period=Batch(2), checkpoint_period="continuous",
        checkpoint_policy="none",
    )  # fmt: skip
    stages.uploads_until, stages.upload_is_slow = 6, True
    with caplog.at_level(logging.WARNING, "recorded"):
        follow_schedule(stages)
    saved = [call for call in stages.calls if call.startswith(("save", "uploaded"))]
    assert saved == [
        call for batches in (2, 6, 8, 9) for call in (f"save {batches}", f"uploaded uuid-{batches}")
    ]
    assert not caplog.messages


def test_a_resumed_run_continues_from_the_first_intact_checkpoint(tmp_path: Path) -> None:
    """Hooks get its batch and uuid, and its metrics are kept until there are newer ones."""
    validated = Progress(4, validated_at=3)
    newer = new_manifest(6)
    older = new_manifest(4, progress=validated, metrics={"validation": {"loss": 0.5}})
    stages = RecordedStages(tmp_path)
    stages.stops_at = 5
    stages.metrics["validation"] = {"lost with": "the ranks"}
    stages.points = [ResumePoint.continuing(each) for each in (newer, older)]
    stages.damage = {newer.uuid: "it lacks a file"}
    result = follow_schedule(stages)
    assert stages.calls[0] == f"on_trial_startup 4 4 {older.uuid}"
    assert stages.calls[3] == "train 4 5"
    assert (result.validated_at, result.validation_metrics) == (3, {"loss": 0.5})


def test_metrics_of_lost_batches_are_forgotten(tmp_path: Path) -> None:
    """New ranks begin without a checkpoint: what the dead ranks had measured is not of this run."""
    stages = RecordedStages(tmp_path)
    stages.metrics["validation"] = {"loss": 0.5}
    stages.stops_at = 2
    result = follow_schedule(stages)
    assert (result.validated_at, result.validation_metrics) == (None, {})


def test_a_run_with_nothing_left_to_do_gives_its_own_checkpoint(tmp_path: Path) -> None:
    """A warm start's source checkpoint is not the trial's own."""
    done = new_manifest(progress=Progress(6, validated_at=6, checkpointed_at=6))
    stages = RecordedStages(tmp_path)
    stages.points = [ResumePoint.continuing(done)]
    assert follow_schedule(stages).checkpoint_uuid == done.uuid
    stages = RecordedStages(tmp_path)
    stages.stops_at = 0
    stages.points = [ResumePoint.warm(done, weights_only=True)]
    assert follow_schedule(stages).checkpoint_uuid is None


def test_a_trial_that_is_already_at_its_end_says_how_to_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise a second start of a script ends without a word."""
    stages = RecordedStages(tmp_path)
    done = Progress(6, validated_at=6, checkpointed_at=6)
    stages.points = [ResumePoint.continuing(new_manifest(progress=done))]
    with caplog.at_level(logging.INFO, "recorded"):
        follow_schedule(stages)
    assert caplog.messages[-1] == (
        "trial toy-0000beef is already at 6 of 6 batches; give a greater length"
    )


def test_nothing_begins_where_every_checkpoint_is_damaged(tmp_path: Path) -> None:
    """Not even a hook is called."""
    stages, damaged = RecordedStages(tmp_path), new_manifest(4)
    stages.points, stages.damage = [ResumePoint.continuing(damaged)], {damaged.uuid: "gone"}
    with pytest.raises(CheckpointDamaged, match="gone"):
        follow_schedule(stages)
    assert stages.calls == []
