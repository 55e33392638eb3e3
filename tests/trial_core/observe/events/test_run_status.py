"""Stage, speed and time left, from the events of a run."""

from __future__ import annotations

import pytest

from trial_core.observe.events.run_status import RunStatus
from trial_core.observe.events.throughput import Throughput


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def status(clock: Clock) -> RunStatus:
    """A run of 100 batches of 16 samples that begins now."""
    status = RunStatus(clock=clock)
    status.run_started("toy-0a", 100, 0, 16)
    return status


def train(status: RunStatus, clock: Clock, begin: int, until: int, seconds: float) -> None:
    """A train-workload with one report in the middle."""
    detail = f"[{begin}→{until}]"
    status.stage_started("train-workload", detail)
    clock.now += seconds / 2
    status.batches_trained((begin + until) // 2)
    clock.now += seconds / 2
    status.stage_ended("train-workload", detail, seconds)
    status.metrics_reported("training", until, {"loss": 1.0})


def validate(status: RunStatus, clock: Clock, seconds: float) -> None:
    status.stage_started("validate", "")
    clock.now += seconds
    status.stage_ended("validate", "", seconds)


def test_speed_counts_only_training(status: RunStatus, clock: Clock) -> None:
    """A validation between two workloads does not lower the batches per second."""
    train(status, clock, 0, 10, seconds=4)
    validate(status, clock, seconds=50)
    train(status, clock, 10, 20, seconds=4)
    assert status.batches_per_second == pytest.approx(20 / 8)


def test_speed_follows_a_change(status: RunStatus, clock: Clock) -> None:
    """A slow first batch stops counting after some seconds."""
    train(status, clock, 0, 2, seconds=60)
    for begin in range(2, 62, 10):
        train(status, clock, begin, begin + 10, seconds=5)
    assert status.batches_per_second == pytest.approx(10 / 5)


def test_tokens_and_utilisation_follow_the_speed(status: RunStatus, clock: Clock) -> None:
    """Between workloads they are those of the last one, at the speed of the last seconds."""
    workload = Throughput(2.5, 40.0, 800.0, 0.5, (7,))
    status.throughput_measured(10, workload, workload)
    assert status.throughput == workload
    train(status, clock, 0, 10, seconds=8)
    assert status.throughput == Throughput(1.25, 20.0, 400.0, 0.25, (7,))


@pytest.mark.parametrize(("whole", "samples"), [(16, 40.0), (0, None)])
def test_before_a_workload_has_ended_batches_are_whole(
    status: RunStatus, clock: Clock, whole: int, samples: float | None
) -> None:
    """A trial need not say how many samples that is."""
    status.batch_samples = whole
    train(status, clock, 0, 10, seconds=4)
    assert status.throughput == Throughput(2.5, samples)


def test_time_left_counts_every_stage(status: RunStatus, clock: Clock) -> None:
    """Later validations take time, too."""
    train(status, clock, 0, 25, seconds=5)
    validate(status, clock, seconds=5)
    assert status.seconds_left == pytest.approx(30)


def test_time_left_of_a_resumed_run(clock: Clock) -> None:
    """Batches of earlier runs do not count."""
    status = RunStatus(clock=clock)
    status.run_started("toy-0a", 100, 80, 16)
    assert status.seconds_left is None
    train(status, clock, 80, 90, seconds=7)
    assert status.seconds_left == pytest.approx(7)


def test_an_upload_runs_beside_the_stage(status: RunStatus) -> None:
    """It is the current stage only if there is no other."""
    status.stage_started("checkpoint-upload", "@10")
    status.stage_started("train-workload", "[10→20]")
    assert str(status.stage) == "train-workload [10→20]"
    assert [str(upload) for upload in status.uploads] == ["checkpoint-upload @10"]
    status.stage_ended("train-workload", "[10→20]", 1.0)
    assert str(status.stage) == "checkpoint-upload @10"
    assert status.uploads == []


def test_a_restart_returns_to_the_last_checkpoint(status: RunStatus, clock: Clock) -> None:
    """`batches` and `committed_at` are those of the last checkpoint."""
    train(status, clock, 0, 40, seconds=4)
    status.stage_started("train-workload", "[40→50]")
    status.restarting("a rank died", 1, 5)
    status.run_started("toy-0a", 100, 30, 16)
    assert (status.batches, status.committed_at, status.has_trained) == (30, 30, True)
    assert status.seconds_left is None
