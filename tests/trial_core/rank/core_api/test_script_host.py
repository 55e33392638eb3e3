"""What a script in a slot tells its driver, and where it waits for it."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trial_core
from trial_core.checkpoint.store import CheckpointStore
from trial_core.cluster_info import ClusterInfo
from trial_core.core import (
    Context,
    EarlyExitReason,
    PreemptContext,
    PreemptMode,
    TensorboardMode,
)
from trial_core.errors import SlotsError, StorageError, TrialValueError
from trial_core.messages import Activity, CheckpointWritten, MetricsReported
from trial_core.processes.slots.receipts import Receipts
from trial_core.processes.slots.stop_barrier import Position, StopBarrier
from trial_core.rank.checkpoint_files import CheckpointFiles, tensorboard_in
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.core_api import script_host
from trial_core.rank.core_api.script_host import ScriptHost, current_slot, in_slot
from trial_core.rank.trial.context import RunInfo
from trial_core.schedule.work import Work


class Slot:
    """A host in this process, and what it has sent."""

    def __init__(
        self, run_dir: Path, rank: int = 0, experiment: dict[str, Any] | None = None
    ) -> None:
        experiment = experiment or {"name": "a"}
        self.sent: list[Any] = []
        self.barrier = StopBarrier()
        self.barrier.begin_workload()
        self.receipts = Receipts()
        ranks = DistributedContext(
            rank=rank, size=2, local_rank=rank, local_size=2, cross_rank=0, cross_size=1
        )
        store = CheckpointStore("memory://slot-host")
        run = RunInfo("a-0b", experiment, tensorboard=tensorboard_in(run_dir, rank))
        files = CheckpointFiles(run_dir, store, ranks, run)
        info = ClusterInfo.of("a-0b", experiment, latest_checkpoint="0a")
        self.run = run
        self.host = ScriptHost(
            info, ranks, run, files, self.sent.append, self.barrier, self.receipts
        )
        self.context = Context(self.host)


def test_reports_are_sent_and_do_not_wait(tmp_path: Path) -> None:
    """Their steps are how far the rank is."""
    slot = Slot(tmp_path)
    slot.context.train.set_status("loading")
    slot.context.train.report_training_metrics(3, {"loss": 0.5})
    assert slot.sent == [
        Activity(text="loading"),
        MetricsReported(kind="training", steps_completed=3, metrics={"loss": 0.5}),
    ]
    assert slot.run.batches_trained == 3


def test_a_script_that_says_what_a_step_holds_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From report to report; without its start, its validations and the waits for its uploads."""
    seconds = iter([0.0, 50.0, 57.0, 57.0, 90.0, 93.0, 93.0, 200.0, 211.0, 211.0])
    slot_time = SimpleNamespace(monotonic=lambda: next(seconds))
    monkeypatch.setattr(script_host, "time", slot_time)
    slot = Slot(tmp_path)
    train = slot.context.train
    train.set_work_per_step(samples=4, tokens=40)
    train.report_training_metrics(3, {})
    train.report_validation_metrics(5, {})
    train.report_training_metrics(7, {})
    slot.host.commit("u", 8, shard=False, wait=False)
    train.report_training_metrics(13, {})
    reported = [each for each in slot.sent if isinstance(each, MetricsReported)]
    assert [(each.steps, each.seconds) for each in reported] == [
        (3, 7.0), (0, 0.0), (2, 3.0), (5, 11.0),
    ]  # fmt: skip
    assert reported[0].work == Work(samples=4, tokens=40)


def test_groups_progress_and_messages_are_sent(tmp_path: Path) -> None:
    """In the forms that a run has for them."""
    slot = Slot(tmp_path)
    slot.context.train.report_metrics("validation", 3, {"loss": 0.5})
    slot.context.train.report_metrics("inference", 3, {"rate": 2})
    slot.context.train.report_progress(0.25)
    slot.context.train.report_early_exit(EarlyExitReason.INVALID_HP)
    slot.context.alert("look", "a spike", level="warn")
    assert slot.sent == [
        MetricsReported(kind="validation", steps_completed=3, metrics={"loss": 0.5}),
        MetricsReported(
            kind="training", steps_completed=3, metrics={"inference/rate": 2}, group="inference"
        ),
        Activity(text="25%"), Activity(text="ends early: invalid_hp"),
        Activity(text="look: a spike"),
    ]  # fmt: skip
    with pytest.raises(TrialValueError, match=r"report_progress: expected 0 to 1, got 25"):
        slot.context.train.report_progress(25)


def test_the_best_validation_is_that_of_all_starts(tmp_path: Path) -> None:
    """By the searcher metric; a number that is not finite does not count."""
    experiment = {"name": "a", "searcher": {"metric": "acc", "smaller_is_better": False}}
    slot = Slot(tmp_path, experiment=experiment)
    seen = []
    for metrics in ({"loss": 9.0}, {"acc": 0.5}, {"acc": float("nan")}, {"acc": 0.25}):
        slot.context.train.report_validation_metrics(1, metrics)
        seen.append(slot.context.train.get_experiment_best_validation())
    assert seen == [None, 0.5, 0.5, 0.5]


def test_files_for_tensorboard_are_stored_when_the_script_says_so(tmp_path: Path) -> None:
    """With `TensorboardMode.MANUAL`; else always."""
    slot = Slot(tmp_path)
    context = Context(slot.host, tensorboard_mode=TensorboardMode.MANUAL)
    context.train.get_tensorboard_path().mkdir(parents=True, exist_ok=True)
    assert not slot.run.tensorboard.has_files_to_upload
    context.train.upload_tensorboard_files()
    assert slot.run.tensorboard.has_files_to_upload


def test_another_rank_waits_until_the_driver_has_its_report(tmp_path: Path) -> None:
    """Not for the receipt of yet another rank; and not when the run has failed."""
    slot = Slot(tmp_path, rank=1)
    raised: list[BaseException] = []

    def report(step: int) -> threading.Thread:
        def call() -> None:
            try:
                slot.context.train.report_training_metrics(step, {"loss": 0.5})
            except SlotsError as error:
                raised.append(error)

        script = threading.Thread(target=call, daemon=True)
        script.start()
        while len(slot.sent) < step:
            script.join(0.01)
        return script

    first = report(1)
    slot.receipts.note("of another rank")
    first.join(0.05)
    assert first.is_alive()
    assert slot.sent[0].rank == 1
    slot.receipts.note(slot.sent[0].receipt)
    first.join(5)
    assert (first.is_alive(), raised) == (False, [])
    second = report(2)
    failure = SlotsError("the driver is gone")
    slot.host.failed(failure)
    second.join(5)
    assert (second.is_alive(), raised) == (False, [failure])


def test_the_status_of_another_rank_is_not_sent(tmp_path: Path) -> None:
    """Every rank may set one."""
    slot = Slot(tmp_path, rank=1)
    slot.context.train.set_status("loading")
    assert slot.sent == []


def test_a_script_waits_until_its_checkpoint_is_committed(tmp_path: Path) -> None:
    """Not for another one."""
    slot = Slot(tmp_path)
    uuids: list[str] = []

    def store() -> None:
        with slot.context.checkpoint.store_path({"steps_completed": 7}) as (path, uuid):
            (path / "state").write_text("7")
            uuids.append(uuid)

    script = threading.Thread(target=store, daemon=True)
    script.start()
    while not slot.sent:
        script.join(0.01)
    slot.host.released("another")
    script.join(0.05)
    assert script.is_alive()
    assert slot.sent == [CheckpointWritten(uuid=uuids[0], steps_completed=7)]
    folder = tmp_path / "staging" / uuids[0] / "rank-0"
    assert {path.name for path in folder.iterdir()} == {"state", "metadata.json"}
    slot.host.released(uuids[0])
    script.join(5)
    assert not script.is_alive()


def test_a_script_that_does_not_wait_waits_for_the_next_checkpoint(tmp_path: Path) -> None:
    """One upload at a time. The driver is told that the script runs on."""
    slot = Slot(tmp_path)
    uuids: list[str] = []

    def store() -> None:
        for step in (1, 2):
            with slot.context.checkpoint.store_path({"steps_completed": step}, wait=False) as made:
                uuids.append(made[1])

    script = threading.Thread(target=store, daemon=True)
    script.start()
    while len(uuids) < 2:
        script.join(0.01)
    script.join(0.05)
    first = CheckpointWritten(uuid=uuids[0], steps_completed=1, waits=False)
    assert (script.is_alive(), slot.sent) == (True, [first])
    slot.host.released(uuids[0])
    script.join(5)
    second = CheckpointWritten(uuid=uuids[1], steps_completed=2, waits=False)
    assert (script.is_alive(), slot.sent) == (False, [first, second])


def test_each_question_is_a_step_of_the_stop_barrier(tmp_path: Path) -> None:
    """So the ranks are told at the same one."""
    slot = Slot(tmp_path)
    should_preempt = slot.context.preempt.should_preempt
    assert [should_preempt(), should_preempt()] == [False, False]
    assert slot.barrier.pause() == Position(1, 2)
    slot.barrier.resume_until(Position(1, 3))
    assert [should_preempt(), slot.host.was_preempted] == [False, False]
    assert [should_preempt(), slot.host.was_preempted] == [True, True]
    slot.barrier.reset()
    assert should_preempt(), "a script that was told to end is not told otherwise"


def test_a_rank_that_may_not_ask_is_ready_for_a_signal(tmp_path: Path) -> None:
    """As one that has asked. With `ChiefOnly`, rank 0 still says when."""
    for rank, ready in ((0, []), (1, ["ready"])):
        slot, seen = Slot(tmp_path, rank), []
        slot.host._on_first_question = lambda seen=seen: seen.append("ready")
        asked = PreemptContext(slot.host, PreemptMode.ChiefOnly)
        assert seen == ready
        if rank == 0:
            assert not asked.should_preempt()
            assert seen == ["ready"]


def test_storage_in_another_processs_memory_is_refused(tmp_path: Path) -> None:
    """Only the resume point was fetched, by the driver."""
    slot = Slot(tmp_path)
    with slot.context.checkpoint.restore_path("0a") as path:
        assert path == tmp_path / "restored" / "0a"
    assert slot.context.checkpoint.get_metadata("0a") == {}
    for call in (slot.context.checkpoint.get_metadata, slot.context.checkpoint.delete):
        with pytest.raises(StorageError, match="0c is in the memory of another process"):
            call("0c")


def test_arguments_for_scripts_outside_a_slot_are_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The experiment file decides where checkpoints are stored."""
    slot = Slot(tmp_path)
    with in_slot(slot.host), trial_core.init(checkpoint_storage="/elsewhere") as context:
        assert context.info is slot.host.info
    assert "checkpoint_storage is not used: in a slot" in caplog.text


def test_a_host_is_current_until_its_script_ends(tmp_path: Path) -> None:
    """Also if the script raises: the process may run another one."""
    host = Slot(tmp_path).host

    def run() -> None:
        with in_slot(host):
            assert current_slot() is host
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert current_slot() is None
