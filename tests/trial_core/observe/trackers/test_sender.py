"""The sender: how it ends, and when it is started again."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest

from tests.support.driving import TRIAL
from tests.support.flow import one_slot
from tests.support.own_lines_tracker import LinesTracker
from tests.support.processes import wait_until_gone
from tests.support.waiting import until
from trial_core.checkpoint.store import CheckpointStore
from trial_core.observe.ledger.time_ledger import TimeLedger
from trial_core.observe.trackers.journal import (
    FOLDER,
    JOURNAL,
    ORDER,
    JournalWriter,
    State,
    write_state,
)
from trial_core.observe.trackers.records import Metrics
from trial_core.observe.trackers.sender import END, SenderOrder, SenderProcess
from trial_core.observe.trackers.stored_journal import sync_trackers
from trial_core.observe.trackers.tracking import Tracking
from trial_core.schedule.ending import Ending

WAKES_THAT_FILL_A_PIPE = 70_000


@pytest.fixture
def order(tmp_path: Path, own_package: Path) -> SenderOrder:
    """An order for a journal of three points."""
    with closing(JournalWriter(tmp_path / FOLDER / JOURNAL)) as journal:
        for batches in (4, 8, 12):
            values = {"training/loss": 1 / batches}
            journal.append(Metrics(at=0.0, batches=batches, samples=0, attempt=1, values=values))
    return SenderOrder(
        trial=TRIAL, experiment="toy", run_dir=str(tmp_path), patience_seconds=5.0, measures=False,
        trackers={"lines": {"file": str(tmp_path / "lines")}},
    )  # fmt: skip


@pytest.fixture
def stopped(order: SenderOrder) -> Iterator[tuple[SenderProcess, psutil.Process]]:
    """A sender that does nothing, not even end itself."""
    sender, process = started(order)
    process.suspend()
    yield sender, process
    with suppress(psutil.NoSuchProcess):
        process.kill()
        process.wait(60)


def started(order: SenderOrder) -> tuple[SenderProcess, psutil.Process]:
    others = psutil.Process().children()
    sender = SenderProcess(order, {}, print)
    (process,) = (each for each in psutil.Process().children() if each not in others)
    return sender, process


def returns(call: Callable[[], Any]) -> bool:
    """Whether a call returns; one that does not is left behind."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(60)
    return not thread.is_alive()


def test_a_full_pipe_does_not_hold_up_the_end(
    stopped: tuple[SenderProcess, psutil.Process],
) -> None:
    sender, _ = stopped
    for _ in range(WAKES_THAT_FILL_A_PIPE):
        sender.wake()
    assert returns(lambda: sender.end(lambda has_ended: has_ended(0.0)))


def test_a_sender_that_cannot_be_killed_does_not_hold_up_the_end(
    stopped: tuple[SenderProcess, psutil.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that waits for a disk that is lost."""
    sender, _ = stopped
    monkeypatch.setattr(os, "killpg", lambda group, number: None)
    assert returns(lambda: sender.end(lambda has_ended: has_ended(0.0)))


def test_what_a_dead_sender_has_started_is_ended(order: SenderOrder) -> None:
    """Its id stays reserved until then: no other process can get it."""
    child_seconds = "3333.25"
    order.trackers["lines"] |= {"hang": "no file", "child": child_seconds}
    sender, process = started(order)
    sender.wake()
    (child,) = until(
        lambda: [each for each in process.children() if child_seconds in each.cmdline()],
        "its child",
    )
    process.kill()
    until(lambda: not sender.wake(), "its end")
    assert process.status() == psutil.STATUS_ZOMBIE
    sender.end(lambda has_ended: has_ended(0.0))
    assert wait_until_gone([child.pid], 30) == []


def test_a_sender_survives_its_driver(order: SenderOrder) -> None:
    """What it says is read by no process any more, and it sends on."""
    order.trackers["lines"]["refuses"] = '"batches":4'
    unread, said = os.pipe()
    os.close(unread)
    given = msgspec.json.encode(order) + b"\n" + END
    command = [sys.executable, "-m", "trial_core.observe.trackers.sender"]
    subprocess.run(command, input=given, stdout=said, stderr=subprocess.PIPE, timeout=60)
    os.close(said)
    points = LinesTracker.points(Path(order.run_dir) / "lines", "training/loss")
    assert [step for step, _ in points] == [8, 12]


@pytest.mark.long
def test_a_sender_that_dies_while_mlflow_makes_its_tables(
    order: SenderOrder, tmp_path: Path
) -> None:
    """As one whose time is over, on a slow machine: the next one finds no half of a database."""
    from mlflow.tracking import MlflowClient

    folder = tmp_path / "mlflow"
    order.trackers = {"mlflow": {"tracking_uri": f"sqlite:///{folder}/new.db"}}
    order.patience_seconds = 120.0
    sender, process = started(order)
    sender.wake()
    until(lambda: any(each.stat().st_size for each in folder.glob("*new.db*")), "its first tables")
    process.kill()
    sender.end(lambda has_ended: has_ended(60.0))
    assert not (folder / "new.db").exists()

    sender, _ = started(order)
    sender.end(lambda has_ended: has_ended(120.0))
    assert [each.name for each in folder.iterdir()] == ["new.db"]
    client = MlflowClient(order.trackers["mlflow"]["tracking_uri"])
    (run,) = client.search_runs([client.get_experiment_by_name("toy").experiment_id])
    assert run.data.metrics == {"training/loss": 1 / 12}


class DeadSender:
    """Dies at once each time it is started."""

    started_at: list[float]
    ended: int

    def __init__(self, *_: Any) -> None:
        self.started_at.append(clock.monotonic())

    def wake(self) -> bool:
        return False

    def end(self, *_: Any) -> None:
        type(self).ended += 1


clock = SimpleNamespace(time=time.time)


def test_a_sender_that_dies_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is started again after pauses that grow up to ten minutes; that is said once."""
    monkeypatch.setattr(DeadSender, "started_at", [], raising=False)
    monkeypatch.setattr(DeadSender, "ended", 0, raising=False)
    monkeypatch.setattr("trial_core.observe.trackers.tracking.SenderProcess", DeadSender)
    monkeypatch.setattr("trial_core.observe.trackers.tracking.time", clock)
    clock.monotonic = lambda: 0.0
    config = one_slot(tmp_path, 4, trackers=["tensorboard"])
    store = CheckpointStore(f"file://{tmp_path}/store")
    with Tracking(
        config, TRIAL, tmp_path, store, 1, lambda: TimeLedger(TRIAL, []), Ending(),
        logging.getLogger("tests.trackers"),
    ) as tracking:  # fmt: skip
        for now in range(0, 2000, 10):
            clock.monotonic = lambda now=now: float(now)
            tracking.notice("training continues")
        assert DeadSender.started_at == [0, 10, 30, 70, 150, 310, 630, 1230, 1830]
        assert DeadSender.ended == len(DeadSender.started_at) - 1
    assert len([line for line in caplog.messages if "has died" in line]) == 1


def test_sync_opens_only_trackers_that_lack_something(tmp_path: Path, order: SenderOrder) -> None:
    """Another one would show its run as running, or as ended well."""
    events = tmp_path / "events"
    order.trackers["tensorboard"] = {"logdir": str(events)}
    write_state(tmp_path / FOLDER / "tensorboard.json", State(run=str(events), sent=3))
    (tmp_path / FOLDER / ORDER).write_bytes(msgspec.json.encode(order))
    store = CheckpointStore(f"file://{tmp_path}/storage")
    logger = logging.getLogger("tests.trackers")
    assert sync_trackers(store, TRIAL, tmp_path, 30.0, print, logger) == ({"lines": 3}, {})
    assert not events.exists()
