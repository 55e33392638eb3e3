"""Which failures of ranks are worth another launch, and where."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.slots import toy_config
from trial_core.checkpoint.manifest import Topology
from trial_core.checkpoint.store import CheckpointStore
from trial_core.driver.failure_policy import Failure, FailurePolicy, Relaunch, Restarts
from trial_core.driver.run import Launch, LaunchStatus, Run
from trial_core.errors import LaunchError, RankFailed, Stalled, TopologyMismatch
from trial_core.messages import FitBegun, Length


def killed(during: str = "train-workload") -> RankFailed:
    return RankFailed(rank=1, host="here", during=during, signal_name="SIGKILL")


def raised(
    message: str = "out of luck",
    error_type: str = "RuntimeError",
    at: int | None = None,
    rank: int = 1,
) -> RankFailed:
    return RankFailed(
        rank=rank, host="here", during="train-workload", error_type=error_type,
        error_message=message, batches_trained=at,
    )  # fmt: skip


@pytest.mark.parametrize("max_restarts", [0, 1, 3])
def test_at_most_max_restarts_are_granted(max_restarts: int) -> None:
    """The failure after the last restart ends the run."""
    restarts = Restarts(max_restarts)
    granted = [restarts.grant(killed(), 5, True, 0) for _ in range(max_restarts + 2)]
    assert granted == [True] * max_restarts + [False] * 2


def test_an_exception_before_training_is_not_retried() -> None:
    """It would be raised again, so no restart is spent on it; a killed rank gets one."""
    restarts = Restarts(5)
    assert not restarts.grant(raised(), 0, False, 0)
    assert restarts.count == 0
    assert restarts.grant(killed(), 0, False, 0)


@pytest.mark.parametrize(
    ("again", "is_granted"),
    [
        (lambda: (raised(), 8), False),
        (lambda: (raised(rank=0), 8), False),
        (lambda: (raised(), 9), True),
        (lambda: (raised("12.3 MiB are free, process 77 has the rest"), 8), False),
        (lambda: (raised(error_type="KeyError"), 8), True),
        (lambda: (killed(), 8), True),
    ],
    ids=["same", "on another rank", "at another batch", "another text", "another type", "killed"],
)
def test_a_repeated_exception_is_not_retried(again: Any, is_granted: bool) -> None:
    """The same type of exception at the same batch after a restart ends the run."""
    restarts = Restarts(5)
    assert restarts.grant(raised(), 8, True, 0)
    failure, batches_trained = again()
    assert restarts.grant(failure, batches_trained, True, 0) == is_granted


def test_the_pause_before_a_restart_grows() -> None:
    """From none to one minute."""
    restarts, pauses = Restarts(8), []
    for _ in range(8):
        assert restarts.grant(Stalled("no batch has ended"), 8, True, 0)
        pauses.append(restarts.pause_seconds)
    assert pauses == [0, 2, 4, 8, 16, 32, 60, 60]
    assert not restarts.grant(Stalled("no batch has ended"), 8, True, 0)


def test_a_restart_after_a_new_checkpoint_has_no_pause() -> None:
    """One that was stored since the restart before, also by the launch that has failed."""
    restarts, pauses = Restarts(8), []
    for stored in (0, 0, 0, 1, 5, 5, 5, 6):
        assert restarts.grant(killed(), 8, True, stored)
        pauses.append(restarts.pause_seconds)
    assert pauses == [0, 2, 4, 0, 0, 2, 4, 0]


class FakePool:
    """Nodes of which fewer may be used.

    Args:
        has_fewer: whether another number of ranks is possible.
        has_new: whether there are nodes that have not trained, and enough without them.

    Attributes:
        asked: the numbers of ranks that it was asked to do without.
    """

    def __init__(self, has_fewer: bool = False, has_new: bool = False) -> None:
        self._has_fewer, self._has_new = has_fewer, has_new
        self.asked: list[int] = []

    def can_leave_out(self, slots: int) -> bool:
        self.asked.append(slots)
        return self._has_fewer

    def can_retreat(self) -> bool:
        return self._has_new


class Launches:
    """Launches of a run with at most 32 ranks, and what is granted when they fail."""

    def __init__(self, limit: int = 5, **nodes: bool) -> None:
        self.pool = FakePool(**nodes)
        self.told: list[str] = []
        self.restarts: list[str] = []
        self.policy = FailurePolicy(self.pool, limit)  # type: ignore[arg-type]

    def fail(
        self,
        failure: Failure,
        slots: int = 32,
        trained: int = 0,
        begins_at: int = 0,
        stop_request: Any = None,
    ) -> Relaunch | None:
        """What is granted to ranks that have failed after so many batches."""
        launch: Any = SimpleNamespace(
            run=SimpleNamespace(
                config=SimpleNamespace(resources=SimpleNamespace(max_slots=32)),
                stopping=SimpleNamespace(request=stop_request),
                observer=SimpleNamespace(
                    moving=self.told.append,
                    restarting=lambda why, count, limit: self.restarts.append(why),
                ),
                logger=logging.getLogger(__name__),
                stored_checkpoints=0,
            ),
            status=LaunchStatus(
                has_trained=trained > begins_at,
                batches_trained=begins_at,
            ),
            world_size=slots,
        )
        self.policy.launch_ended(launch)
        return self.policy.grant(failure, launch)


def refused(message: str, during: str = "build-trial") -> RankFailed:
    return RankFailed(
        rank=0, host="here", during=during, error_type="TrialError", error_message=message,
        is_ours=True,
    )  # fmt: skip


def unfit(what: str = "FileNotFoundError", host: str = "new") -> RankFailed:
    """A rank that raises while the trial is built."""
    return RankFailed(rank=1, host=host, during="build-trial", error_type=what)


@pytest.mark.parametrize(
    ("failure", "slots", "is_refusal"),
    [
        (refused("24 does not divide 64"), 24, True),
        (TopologyMismatch("saved by 2 stages"), 24, True),
        (refused("no such file"), 32, False),
        (refused("a bad batch", during="train-workload"), 24, False),
    ],
    ids=["while built", "checkpoint", "the largest", "while trained"],
)
def test_fewer_ranks_are_tried_if_the_trial_refuses_their_number(
    failure: Failure, slots: int, is_refusal: bool
) -> None:
    """While it is built, or because a checkpoint cannot be restored. Not for the largest number."""
    launches = Launches(has_fewer=True)
    granted = launches.fail(failure, slots)
    assert granted == (Relaunch(leaves_out=slots) if is_refusal else None)
    assert launches.pool.asked == ([slots] if is_refusal else [])
    assert launches.told == [
        f"the trial refuses {slots} slots, so it gets fewer: {failure}"
    ] * is_refusal  # fmt: skip
    assert launches.restarts == []


def test_the_same_text_for_several_numbers_is_a_mistake() -> None:
    """Which fewer ranks do not mend."""
    launches = Launches(has_fewer=True)
    assert launches.fail(refused("no such file"), 24)
    assert launches.fail(refused("no such file"), 16)
    assert not launches.fail(refused("no such file"), 8)


def test_a_number_that_has_trained_is_no_refusal() -> None:
    """What fails while it is built again may be passing: it gets a restart, and keeps its ranks."""
    launches = Launches(has_fewer=True)
    assert launches.fail(killed(), 24, trained=4)
    granted = launches.fail(unfit("ConnectionError", host="here"), 24)
    assert granted == Relaunch(2, leaves="here")  # left if it is new, which the pool knows
    assert launches.told == []
    assert len(launches.restarts) == 2
    assert not launches.fail(unfit("ConnectionError", host="here"), 24)


def at_line(number: int, **fields: Any) -> RankFailed:
    """An exception whose text differs each time."""
    return RankFailed(
        rank=1, host="here", during="build-loaders", error_type="OSError",
        rank_traceback=f'Traceback:\n  File "/a.py", line {number}, in f\nOSError', **fields,
    )  # fmt: skip


EXITED = RankFailed(rank=0, host="here", during="build-trial", exit_code=3)
CRASHED = RankFailed(rank=0, host="here", during="build-trial", signal_name="SIGSEGV")


@pytest.mark.parametrize(
    ("first", "second", "ends"),
    [
        (at_line(7, error_message="from here"), at_line(7, error_message="from there"), True),
        (at_line(7), at_line(8), False),
        (at_line(7, batches_trained=4), at_line(7, batches_trained=5), False),
        (EXITED, EXITED, True),
        (CRASHED, CRASHED, True),
        (EXITED, CRASHED, False),
        (killed("build-trial"), killed("build-trial"), False),
        (Stalled("no batch has ended"), Stalled("no batch has ended"), False),
    ],
    ids=[
        "line", "another line", "another batch", "exit", "crash", "both", "killed", "stalled"
    ],
)  # fmt: skip
def test_the_same_failure_twice_before_training_ends_the_run(
    first: Failure, second: Failure, ends: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if there were other nodes, or restarts left: the log says why."""
    launches = Launches(has_new=True)
    assert launches.fail(first)
    assert (launches.fail(second) is None) == ends
    assert ("failed twice at the same place" in caplog.text) == ends
    assert launches.fail(at_line(7), trained=5), "after training, another cause is possible"


def test_what_failed_long_ago_may_fail_again() -> None:
    """Ranks that have trained in between show that the place is not the cause."""
    launches = Launches()
    assert launches.fail(killed(), trained=4)
    assert launches.fail(unfit("ConnectionError"))
    assert launches.fail(killed(), trained=900)
    assert launches.fail(unfit("ConnectionError"))
    assert not launches.fail(unfit("ConnectionError"))


@pytest.mark.parametrize("failure", [killed("build-trial"), unfit(), LaunchError("full", "new")])
def test_new_nodes_cost_no_restart(failure: Failure) -> None:
    """If the ranks fail with them before the first batch, and there are enough others."""
    launches = Launches(limit=0, has_new=True)
    assert launches.fail(failure)
    assert launches.told == [f"back to the nodes that have trained, because {failure}"]
    assert launches.restarts == []


def test_nodes_that_have_trained_a_batch_are_not_to_blame() -> None:
    """A restart follows, and their number of ranks works. A workload need not have ended."""
    launches = Launches(has_new=True)
    assert launches.fail(killed(), trained=5, begins_at=4)
    assert launches.told == []
    assert launches.restarts == [str(killed())]


def test_a_replacement_that_cannot_train_is_left() -> None:
    """Where there are not enough others: a restart is spent, and another node may come.

    Whether the number of ranks has trained does not matter. Too few nodes end the run.
    """
    launches = Launches(limit=2)
    assert not launches.fail(LaunchError("its disk is full", "new"))  # the first launch of all
    assert launches.fail(killed(), trained=4)
    assert not launches.fail(LaunchError("too few nodes"))
    granted = launches.fail(LaunchError("its disk is full", "new"), 24)
    assert granted == Relaunch(2, leaves="new")
    assert not launches.fail(LaunchError("its disk is full", "new"))


def test_a_run_that_was_asked_to_stop_is_not_launched_again() -> None:
    launches = Launches(has_fewer=True, has_new=True)
    assert not launches.fail(refused("24 does not divide 64"), 24, stop_request="cancelled")
    assert not launches.fail(killed(), trained=4, stop_request="cancelled")


def test_only_a_restart_has_a_pause() -> None:
    launches = Launches(has_fewer=True)
    for _ in range(3):
        granted = launches.fail(killed(), trained=4)
    assert granted == Relaunch(pause_seconds=4)
    assert launches.fail(refused("24 does not divide 64"), 24) == Relaunch(leaves_out=24)


def test_the_batches_of_an_unfinished_workload_count(tmp_path: Any) -> None:
    """A workload may be long. It has trained from its first batch on, however it is told."""
    launches = []
    for _ in range(2):
        store = CheckpointStore(f"file://{tmp_path}")
        launch = Launch(Run(toy_config(tmp_path), "toy-0a", tmp_path, store))
        launch.status.batches_trained = 4
        launch.note_batches(4)
        launch.note_failure(raised(at=4))
        assert not launch.status.has_trained
        launches.append(launch)
    launches[0].note_batches(5)
    launches[1].note_failure(raised(at=700))
    assert [launch.status.has_trained for launch in launches] == [True, True]
    restarts = Restarts(5)
    assert restarts.grant(raised(at=700), 0, True, 0)
    assert restarts.grant(raised(at=800), 0, True, 0)
    assert not restarts.grant(raised(at=800), 0, True, 0)


def out_of_memory(batches_trained: int) -> RankFailed:
    return RankFailed(
        rank=1, host="here", during="train-workload", error_type="OutOfMemoryError",
        batches_trained=batches_trained,
    )  # fmt: skip


def out_of_memory_in(run: Run, size: int) -> Launch:
    """A launch of the run on 2 ranks, which have no memory for micro-batches of `size` samples."""
    launch = Launch(run)
    launch.status.has_trained = launch.answers.loads_micro_batches = True
    launch.answers.topology = Topology(
        world_size=2, data_parallel_size=2, batch_samples=8, micro_batch_samples=size
    )
    return launch


def test_a_restart_keeps_the_size_of_micro_batches(tmp_path: Path) -> None:
    """That of the last launch, if no smaller one is possible: the configured one would not fit."""
    run = Run(toy_config(tmp_path), "toy-0a", tmp_path, CheckpointStore(f"file://{tmp_path}"))
    policy, sizes = FailurePolicy(FakePool(), 5), []  # type: ignore[arg-type]
    for batches, size in ((2, 2), (3, 1)):
        granted = policy.grant(out_of_memory(batches), out_of_memory_in(run, size))
        assert granted is not None
        sizes.append(granted.micro_batch_samples)
    assert sizes == [1, None]  # None: the driver keeps it


FIT = FitBegun(
    max_length=None, reporting_period=Length(unit="batches", value=1), validation_period=None,
    checkpoint_period=None, checkpoint_policy=None, step_zero_validation=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("entrypoint", "given"),
    [
        ("python trainer_script.py", {}),
        ("toy_trial:ToyTrial", {"fit": FIT}),
        ("toy_trial:ToyTrial", {"micro_batch_samples": 2}),
    ],
    ids=["a script in slots", "ranks that have joined", "an engine that ignores it"],
)
def test_micro_batches_that_cannot_shrink_cost_a_restart(
    entrypoint: str, given: dict[str, Any], tmp_path: Path
) -> None:
    """A script builds its engines itself, so they would come back with the same size for ever."""
    config = toy_config(tmp_path, entrypoint=entrypoint)
    run = Run(config, "toy-0a", tmp_path, CheckpointStore(f"file://{tmp_path}"), **given)
    policy = FailurePolicy(None, 5)
    assert policy.grant(out_of_memory(2), out_of_memory_in(run, 4)) == Relaunch()
    assert policy.grant(out_of_memory(2), out_of_memory_in(run, 4)) is None
