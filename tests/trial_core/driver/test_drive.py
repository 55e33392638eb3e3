"""The states of a run, one by one: what follows each, and what is raised. Without ranks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest

from tests.support.slots import toy_config
from trial_core.checkpoint.store import CheckpointStore
from trial_core.driver import drive
from trial_core.driver.drive import Driver, try_trial
from trial_core.driver.failure_policy import Relaunch
from trial_core.driver.placement import Placement
from trial_core.driver.result import TrialResult
from trial_core.driver.run import Given, Launch, Run
from trial_core.driver.states import (
    Aborted,
    Completed,
    Ended,
    Launching,
    Moving,
    RanksFailed,
    Restarting,
)
from trial_core.errors import (
    LaunchError,
    RankFailed,
    Stalled,
    Stopped,
    StorageError,
    TopologyMismatch,
    TrialError,
)
from trial_core.observe.events.observers import Observer
from trial_core.processes.machine.run_dirs import KEPT, RANK_FILE_FOLDERS
from trial_core.processes.nodes.node_pool import NodePool
from trial_core.schedule.stop_requests import StopHandler

NEWEST = "; the last checkpoint is at batch 60"
KILLED = RankFailed(rank=1, host="here", during="train-workload", signal_name="SIGKILL")
FAILURES = [
    KILLED, Stalled("no batch has ended"), LaunchError("too few slots"),
    TopologyMismatch("saved by 2 stages"),
]  # fmt: skip
TRAINED = TrialResult("toy-0a", batches_trained=100, stopped_early=False)
SAVED = TrialResult("toy-0a", batches_trained=60, stopped_early=True, checkpoint_uuid="4f0c21aa")
DRAINED = "node a is drained"


class FullMachine(Placement):
    """Has no slots left, or what else a test says is wrong."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error or LaunchError("too few slots")

    def prepare(self, launch: Launch) -> Any:
        raise self._error


class FakePolicy:
    """Grants what a test says.

    Attributes:
        granted: the answer to the next failure.
        asked: the failures that it was asked about.
        ended: the launches that have ended.
    """

    def __init__(self) -> None:
        self.granted: Relaunch | None = None
        self.asked: list[Exception] = []
        self.ended: list[Launch] = []

    def grant(self, failure: Exception, launch: Launch) -> Relaunch | None:
        self.asked.append(failure)
        return self.granted

    def launch_ended(self, launch: Launch) -> None:
        self.ended.append(launch)


class Moves(Observer):
    """Notes why a run moves."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def moving(self, what: str) -> None:
        self.told.append(what)


class DriverWithoutRanks(Driver):
    """A driver of a run that trains nothing.

    Attributes:
        run: the run, in its own folder.
        policy: as above.
        train: what its launches do in place of training.
    """

    def __init__(self, folder: Path, stopping: StopHandler) -> None:
        config = toy_config(folder)
        store = CheckpointStore(config.checkpoint_storage.url)
        self.run = Run(config, "toy-0a", folder, store, observer=Moves(), stopping=stopping)
        self.policy = FakePolicy()
        self.train: Callable[[Launch], TrialResult] = lambda launch: TRAINED
        self.placement = FullMachine()
        super().__init__(self.run, self.placement, last_checkpoint=lambda: NEWEST)
        self._policy = self.policy  # type: ignore[assignment]

    def train_once(self, launch: Launch) -> TrialResult:
        return self.train(launch)

    def launch(self, moves: str | None = None, can_save: bool = False) -> Launch:
        """One of the run's launches, and how far it came."""
        launch = Launch(self.run)
        launch.status.moves, launch.status.can_save = moves, can_save
        return launch

    def write_rank_files(self) -> Path:
        """Files of ranks that have ended. Returns the folder of those kept for a restart."""
        for name in (*RANK_FILE_FOLDERS, KEPT):
            (self.run.run_dir / name).mkdir()
        return self.run.run_dir / KEPT

    def has_rank_files(self) -> bool:
        return any((self.run.run_dir / name).exists() for name in RANK_FILE_FOLDERS)


def raises(error: Exception) -> Callable[[Launch], TrialResult]:
    """Training that fails."""

    def train(launch: Launch) -> TrialResult:
        raise error

    return train


@pytest.fixture
def stopping() -> Iterator[StopHandler]:
    with StopHandler(600.0) as stopping:
        yield stopping


@pytest.fixture
def driver(tmp_path: Path, stopping: StopHandler) -> DriverWithoutRanks:
    return DriverWithoutRanks(tmp_path, stopping)


def ask_to_stop(driver: DriverWithoutRanks) -> None:
    driver.run.stopping.ask("cancelled", "in Prefect")
    assert driver.run.stopping.wait(30)


# ------------------------------------------------------------------------------------ Launching


def test_ranks_that_have_trained_are_completed(driver: DriverWithoutRanks) -> None:
    """Their launch has the code that the trial was launched with."""
    state = driver.next(Launching())
    assert isinstance(state, Completed)
    assert state.result is TRAINED
    assert state.launch.code.folder == driver.run.config.code


@pytest.mark.parametrize("failure", FAILURES, ids=type)
def test_ranks_may_fail(driver: DriverWithoutRanks, failure: Exception) -> None:
    """Whatever of these it was, another launch may not fail. The slots are idle until then."""
    driver.train = raises(failure)
    state = driver.next(Launching())
    assert isinstance(state, RanksFailed)
    assert state.failure is failure
    assert driver.run.clock.switch("queue") == "idle"


def test_ranks_that_cannot_be_placed_have_failed(driver: DriverWithoutRanks) -> None:
    """The launch ends before it has slots, so there is nothing for the policy to note."""
    driver.train = lambda launch: Driver.train_once(driver, launch)
    state = driver.next(Launching())
    assert isinstance(state, RanksFailed)
    assert str(state.failure) == "too few slots"
    assert driver.policy.ended == []


def test_aborted_ranks_keep_what_those_before_have_saved(driver: DriverWithoutRanks) -> None:
    driver.train = raises(stopped := Stopped("nothing to save"))
    state = driver.next(Launching(SAVED))
    assert isinstance(state, Aborted)
    assert (state.why, state.saved) == (stopped, SAVED)


@pytest.mark.parametrize("error", [StorageError("the disk is full"), TrialError("no metric")])
def test_another_error_ends_the_run(driver: DriverWithoutRanks, error: Exception) -> None:
    """As it is. Of a run that was asked to stop, it names the last checkpoint."""
    driver.train = raises(error)
    with pytest.raises(type(error)) as raised:
        driver.next(Launching())
    assert raised.value is error
    ask_to_stop(driver)
    with pytest.raises(type(error)) as raised:
        driver.next(Launching())
    assert str(raised.value) == f"{error}{NEWEST}"
    assert raised.value.__cause__ is error


# ------------------------------------------------------------------------------------ Completed


def test_a_finished_run_ends_and_keeps_nothing_for_a_restart(driver: DriverWithoutRanks) -> None:
    kept, launch = driver.write_rank_files(), driver.launch()
    assert driver.next(Completed(launch, TRAINED)) == Ended(launch, TRAINED)
    assert not kept.exists()


def test_a_stopped_run_ends_and_keeps_its_files(driver: DriverWithoutRanks) -> None:
    """It may be resumed on this machine."""
    kept, launch = driver.write_rank_files(), driver.launch()
    assert driver.next(Completed(launch, SAVED)) == Ended(launch, SAVED)
    assert kept.exists()


def test_ranks_that_have_saved_to_move_move(driver: DriverWithoutRanks) -> None:
    """With what they have saved, and the reason for people."""
    state = driver.next(Completed(driver.launch(DRAINED, can_save=True), SAVED))
    assert state == Moving(f"saved, to continue on other nodes: {DRAINED}", SAVED)


def test_a_run_that_ends_anyway_does_not_move(driver: DriverWithoutRanks) -> None:
    """It has finished, or its trial asks it to stop, or a person does."""
    finished, asked, cancelled = (driver.launch(DRAINED, can_save=True) for _ in range(3))
    asked.answers.stop_requested = True
    assert driver.next(Completed(finished, TRAINED)) == Ended(finished, TRAINED)
    assert driver.next(Completed(asked, SAVED)) == Ended(asked, SAVED)
    ask_to_stop(driver)
    assert driver.next(Completed(cancelled, SAVED)) == Ended(cancelled, SAVED)


# -------------------------------------------------------------------------------------- Aborted

WHY = Stopped("nothing to save: training had not begun")


def test_ranks_that_move_before_training_keep_what_was_saved(driver: DriverWithoutRanks) -> None:
    state = driver.next(Aborted(driver.launch(DRAINED), WHY, SAVED))
    what = f"ended before training, to continue on other nodes: {DRAINED}"
    assert state == Moving(what, SAVED)


@pytest.mark.parametrize("moves", [None, DRAINED])
def test_a_stop_before_anything_was_saved(driver: DriverWithoutRanks, moves: str | None) -> None:
    """It is raised, with the last checkpoint, also if the ranks were to move."""
    ask_to_stop(driver)
    with pytest.raises(Stopped) as raised:
        driver.next(Aborted(driver.launch(moves), WHY, None))
    assert str(raised.value) == f"{WHY}{NEWEST}"
    assert raised.value.__cause__ is WHY


def test_a_stop_after_a_move_has_the_saved_result(driver: DriverWithoutRanks) -> None:
    """The ranks after the move have trained nothing that could be lost."""
    ask_to_stop(driver)
    launch = driver.launch()
    assert driver.next(Aborted(launch, WHY, SAVED)) == Ended(launch, SAVED)


def test_a_stop_that_loses_batches_is_raised(driver: DriverWithoutRanks) -> None:
    """The ranks after the move may have trained, and could not save."""
    ask_to_stop(driver)
    with pytest.raises(Stopped, match="the last checkpoint is at batch 60"):
        driver.next(Aborted(driver.launch(can_save=True), WHY, SAVED))


# ---------------------------------------------------------------------------------- RanksFailed


def test_a_restart_follows_a_failure_that_the_policy_forgives(
    driver: DriverWithoutRanks,
) -> None:
    driver.policy.granted = Relaunch(pause_seconds=4)
    following = driver.next(RanksFailed(driver.launch(), KILLED))
    assert following == Restarting(KILLED, Relaunch(pause_seconds=4))
    assert driver.policy.asked == [KILLED]


@pytest.mark.parametrize("failure", FAILURES, ids=type)
def test_a_failure_that_the_policy_does_not_forgive_is_raised(
    driver: DriverWithoutRanks, failure: Any
) -> None:
    with pytest.raises(type(failure)) as raised:
        driver.next(RanksFailed(driver.launch(), failure))
    assert raised.value is failure


@pytest.mark.parametrize("failure", FAILURES[:2], ids=type)
def test_a_failure_while_stopping_is_reported_as_stopped(
    driver: DriverWithoutRanks, failure: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It costs no restart. Its own report is in the log."""
    driver.policy.granted = Relaunch()
    ask_to_stop(driver)
    with caplog.at_level(logging.ERROR), pytest.raises(Stopped) as raised:
        driver.next(RanksFailed(driver.launch(), failure))
    assert str(raised.value) == f"failed while stopping: {failure}{NEWEST}"
    assert raised.value.__cause__ is failure
    assert driver.policy.asked == []
    assert caplog.messages == [failure.report()]


@pytest.mark.parametrize("failure", FAILURES[2:], ids=type)
def test_another_failure_while_stopping_names_the_last_checkpoint(
    driver: DriverWithoutRanks, failure: Any
) -> None:
    """It costs no restart, either."""
    driver.policy.granted = Relaunch()
    ask_to_stop(driver)
    with pytest.raises(type(failure)) as raised:
        driver.next(RanksFailed(driver.launch(), failure))
    assert str(raised.value) == f"{failure}{NEWEST}"
    assert raised.value.__cause__ is failure
    assert driver.policy.asked == []


# ------------------------------------------------------------------------- Restarting and Moving


def test_a_restart_forgets_what_was_saved_before_a_move(driver: DriverWithoutRanks) -> None:
    """The failed ranks may have committed a newer checkpoint. Their files are deleted."""
    kept = driver.write_rank_files()
    assert driver.next(Restarting(KILLED, Relaunch())) == Launching(saved=None)
    assert not driver.has_rank_files()
    assert kept.exists()


def test_a_stop_in_the_pause_before_a_restart(driver: DriverWithoutRanks) -> None:
    """It does not wait for the end of the pause, and names the failure as its cause."""
    ask_to_stop(driver)
    with pytest.raises(Stopped) as raised:
        driver.next(Restarting(KILLED, Relaunch(pause_seconds=600)))
    assert str(raised.value) == f"no ranks ran{NEWEST}"
    assert raised.value.__cause__ is KILLED


def test_a_move_keeps_what_was_saved(driver: DriverWithoutRanks) -> None:
    """People are told why. The files of the ranks that have ended are deleted."""
    kept = driver.write_rank_files()
    assert driver.next(Moving(DRAINED, SAVED)) == Launching(SAVED)
    assert not driver.has_rank_files()
    assert kept.exists()
    assert driver.run.observer.told == [DRAINED]  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------ the whole story


def test_a_run_that_fails_and_moves_ends_with_its_last_launch(driver: DriverWithoutRanks) -> None:
    """Each launch has its own answers and progress."""
    driver.policy.granted = Relaunch()
    launches: list[Launch] = []

    def train(launch: Launch) -> TrialResult:
        launches.append(launch)
        if len(launches) == 1:
            raise KILLED
        if len(launches) == 2:
            launch.status.moves = DRAINED
            return SAVED
        return TRAINED

    driver.train = train
    assert driver.drive() == Ended(launches[2], TRAINED)
    assert len({launch.id for launch in launches}) == 3
    assert launches[2].status.moves is None


def test_a_decision_is_carried_out_before_the_next_launch(driver: DriverWithoutRanks) -> None:
    """The size of micro-batches stays for later launches; nodes and numbers are left."""
    sizes, told = list[int | None](), list[object]()
    driver.placement.pool = pool = cast("NodePool", SimpleNamespace())
    for name in ("leave_out", "retreat", "leave"):
        setattr(pool, name, lambda *given, name=name: told.append((name, *given)))

    def train(launch: Launch) -> TrialResult:
        sizes.append(launch.micro_batch_samples)
        driver.policy.granted = decisions.pop(0) if decisions else None
        if driver.policy.granted is not None:
            raise KILLED
        return TRAINED

    decisions = [
        Relaunch(micro_batch_samples=2), Relaunch(leaves_out=24), Relaunch(retreats=True),
        Relaunch(leaves="new"),
    ]  # fmt: skip
    driver.train = train
    driver.drive()
    assert sizes == [None, 2, 2, 2, 2]
    why = str(KILLED)
    assert told == [("leave_out", 24), ("retreat", why), ("leave", "new", why)]


def test_a_run_that_fails_in_the_end_tells_how_it_came_to_this(
    driver: DriverWithoutRanks, caplog: pytest.LogCaptureFixture
) -> None:
    """Its states, with the failures and decisions. A first failure says it all by itself."""
    driver.policy.granted = Relaunch(pause_seconds=0, micro_batch_samples=2)

    def train(launch: Launch) -> NoReturn:
        if launch.micro_batch_samples is not None:
            driver.policy.granted = None
        raise KILLED

    driver.train = train
    with pytest.raises(RankFailed):
        driver.drive()
    (story,) = [text for text in caplog.messages if text.startswith("how it came to this")]
    failed = "0 ranks failed at batch 0 (RankFailed)"
    assert story == (
        f"how it came to this: launching → {failed} → restarting with micro-batches of 2 samples "
        f"→ launching → {failed}"
    )
    caplog.clear()
    with pytest.raises(RankFailed):
        driver.drive()
    assert not any(text.startswith("how it came to this") for text in caplog.messages)


def test_a_run_that_is_stopped_tells_no_story(
    driver: DriverWithoutRanks, caplog: pytest.LogCaptureFixture
) -> None:
    """A stop is no failure, also in the pause before a restart."""
    driver.policy.granted = Relaunch(pause_seconds=600)

    driver.train = raises(KILLED)
    threading.Timer(0.2, lambda: driver.run.stopping.ask("cancelled", "in Prefect")).start()
    with pytest.raises(Stopped):
        driver.drive()
    assert not any(text.startswith("how it came to this") for text in caplog.messages)


def test_the_newest_code_is_launched(driver: DriverWithoutRanks, tmp_path: Path) -> None:
    """The code of a trial may have been corrected since its ranks failed."""
    driver.policy.granted = Relaunch()
    code = tmp_path / "code"
    code.mkdir()
    driver.run.config = driver.run.config.model_copy(update={"code": code})
    seen: list[bytes | None] = []

    def train(launch: Launch) -> TrialResult:
        seen.append(launch.code.archive)
        (code / "toy_trial.py").write_text(f"LAUNCHES = {len(seen)}")
        if len(seen) < 3:
            raise KILLED
        return TRAINED

    driver.train = train
    driver.drive()
    assert len(set(seen)) == 3


def test_a_test_that_fails_says_why(
    stopping: StopHandler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A storage that stores nothing may not delete either: that is not the cause."""

    class Failing:
        def drive(self) -> NoReturn:
            raise StorageError("may not write")

    def forget(store: CheckpointStore, trial: str) -> NoReturn:
        raise StorageError("may not delete")

    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path))
    monkeypatch.setattr(drive, "Driver", lambda *_: Failing())
    monkeypatch.setattr(CheckpointStore, "forget_trial", forget)
    given = Given(stopping=stopping)
    with pytest.raises(StorageError, match="may not write"):
        try_trial(toy_config(tmp_path), "toy-0000beef", given)
