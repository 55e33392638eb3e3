"""The slot group: real rank processes, and every way in which they may end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.processes import alive, descendants, wait_until_gone
from tests.support.slots import TOY, build, toy_config
from trial_core.errors import DeadlineExceeded, LaunchError, RankFailed, SlotsError
from trial_core.messages import BuildLoaders, Done, LoadersBuilt, Ping
from trial_core.slots.group import SlotGroup

pytestmark = pytest.mark.slots


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_answers(tmp_path: Path, world_size: int) -> None:
    """A request is answered by all ranks, each its own process."""
    with SlotGroup(world_size, working_dir=tmp_path) as slots:
        assert slots.request(Ping(), Done) == [Done()] * world_size
        assert len(set(slots.pids)) == world_size


def test_leaving_the_group_leaves_no_process(tmp_path: Path) -> None:
    """When the block ends, so have the ranks."""
    with SlotGroup(2, working_dir=tmp_path) as slots:
        pids = slots.pids
    assert alive(pids) == []


def test_ranks_leave_it_to_the_driver_what_a_signal_means(tmp_path: Path) -> None:
    """A service that is stopped signals all of its processes, and ranks have to save first."""
    with SlotGroup(1, working_dir=tmp_path) as slots:
        slots.request(Ping(), Done)
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(slots.pids[0], number)
        assert slots.request(Ping(), Done) == [Done()]


def test_a_killed_rank_is_named_and_frees_the_others(tmp_path: Path) -> None:
    """SIGKILL of one rank fails the request with that rank and signal, and ends the group."""
    with SlotGroup(2, working_dir=tmp_path) as slots:
        os.kill(slots.pids[0], signal.SIGSTOP)  # rank 0 will never answer
        waiting = slots.submit(Ping())
        os.kill(slots.pids[1], signal.SIGKILL)
        with pytest.raises(RankFailed) as failure:
            waiting.result(timeout=10)
        assert (failure.value.rank, failure.value.signal_name) == (1, "SIGKILL")
        assert failure.value.during == "Ping"
        assert wait_until_gone(slots.pids, 10) == []


def test_after_a_failure_every_request_says_why(tmp_path: Path) -> None:
    """A group that has lost a rank refuses further work with the same cause."""
    with SlotGroup(2, working_dir=tmp_path) as slots:
        waiting = slots.submit(Ping())
        waiting.result(timeout=10)
        os.kill(slots.pids[1], signal.SIGKILL)
        wait_until_gone(slots.pids, 10)
        with pytest.raises(RankFailed, match=r"rank 1 .* SIGKILL"):
            slots.request(Ping(), Done)


def test_a_silent_rank_runs_into_the_deadline(tmp_path: Path) -> None:
    """A rank that is alive but does not answer is named, and the group is killed."""
    with SlotGroup(2, working_dir=tmp_path) as slots:
        os.kill(slots.pids[1], signal.SIGSTOP)
        with pytest.raises(DeadlineExceeded, match=r"no answer to Ping within 0.3 s from rank 1;"):
            slots.request(Ping(), Done, timeout_seconds=0.3)
        assert wait_until_gone(slots.pids, 10) == []


def test_a_rank_that_dies_while_starting_shows_its_log(tmp_path: Path) -> None:
    """A worker that cannot even start fails the launch with its exit code and its words."""
    (tmp_path / "msgspec.py").write_text("raise SystemExit('no such luck')\n")
    with pytest.raises(RankFailed) as failure:
        SlotGroup(
            2, working_dir=tmp_path, log_dir=tmp_path, environment={"PYTHONPATH": str(tmp_path)}
        )
    assert failure.value.exit_code == 1
    assert failure.value.during == "starting up"
    assert "no such luck" in failure.value.report()


def test_a_missing_folder_is_a_launch_error(tmp_path: Path) -> None:
    """Ranks cannot run in a folder that does not exist."""
    with pytest.raises(LaunchError, match=r"cannot start rank 0 in .*nowhere"):
        SlotGroup(1, working_dir=tmp_path / "nowhere")


def test_an_answer_of_another_kind_is_refused(tmp_path: Path) -> None:
    """A result that does not belong to the request is an error, not a surprise later."""
    with SlotGroup(1, working_dir=tmp_path) as slots, pytest.raises(SlotsError, match="answered"):
        slots.request(Ping(), LoadersBuilt)


def test_a_request_out_of_order_fails_with_the_reason(tmp_path: Path) -> None:
    """Loaders cannot be built before the trial: the rank says so, and the driver repeats it."""
    with SlotGroup(1, working_dir=tmp_path) as slots, pytest.raises(RankFailed) as failure:
        slots.request(BuildLoaders(batches_trained=0, checkpoint=None), LoadersBuilt)
    assert failure.value.error_type == "SlotsError"
    assert "needs BuildTrial" in str(failure.value)


DRIVER = """
import sys
import tempfile
from pathlib import Path
from trial_core.slots.group import SlotGroup

slots = SlotGroup(2, working_dir=Path(sys.argv[1]))
print(*slots.pids, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_end_with_their_driver(tmp_path: Path, how: signal.Signals) -> None:
    """However the driver ends, no rank is left 10 seconds later."""
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with driver:
        assert driver.stdout is not None
        pids = [int(word) for word in driver.stdout.readline().split()]
        assert len(alive(pids)) == 2
        driver.send_signal(how)
        assert wait_until_gone(pids, 10) == []


def test_a_death_is_noticed_although_a_forked_child_lives_on(tmp_path: Path) -> None:
    """A rank's children hold copies of its connection: its process is watched, not only that."""
    with SlotGroup(1, working_dir=TOY) as slots:
        build(slots, toy_config(tmp_path, entrypoint="bad_trials:Forks"), tmp_path)
        (rank,) = slots.pids
        (child,) = descendants(rank)
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(RankFailed, match="SIGKILL"):
            slots.submit(Ping()).result(timeout=10)
    assert wait_until_gone([child], 10) == []


def test_a_display_that_fails_does_not_end_training(tmp_path: Path) -> None:
    """Whoever is told of a rank's words may raise: the rank goes on, and so do its answers."""

    def broken(rank: int, line: str) -> None:
        raise RuntimeError("no room on the screen")

    with SlotGroup(1, working_dir=TOY, log_dir=tmp_path, on_log=broken) as slots:
        build(slots, toy_config(tmp_path), tmp_path)  # its warnings are forwarded
        assert slots.request(Ping(), Done, timeout_seconds=10) == [Done()]


def test_an_interrupt_while_closing_still_leaves_no_process(tmp_path: Path) -> None:
    """Ctrl-C during an orderly end is no reason to leave ranks behind."""
    slots = SlotGroup(1, working_dir=tmp_path)
    os.kill(slots.pids[0], signal.SIGSTOP)  # it will not shut down by itself

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            slots.close()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert wait_until_gone(slots.pids, 10) == []


def test_a_rank_that_sends_nonsense_is_named_with_what_it_sent(tmp_path: Path) -> None:
    """The first cause is what was wrong with the message, not the rank's end that follows."""
    config = toy_config(tmp_path, entrypoint="bad_trials:TalksNonsense")
    with SlotGroup(1, working_dir=TOY) as slots, pytest.raises(RankFailed) as failure:
        build(slots, config, tmp_path)
    assert failure.value.error_type == "ProtocolError"
    assert "sent something that is no message" in str(failure.value)


def test_an_answer_that_cannot_be_sent_is_an_error_like_others(tmp_path: Path) -> None:
    """A message with a lone surrogate in it (an undecodable file name) still reaches the driver."""
    config = toy_config(tmp_path, entrypoint="bad_trials:RaisesASurrogate")
    with SlotGroup(1, working_dir=TOY) as slots, pytest.raises(RankFailed, match=r"no file \?"):
        build(slots, config, tmp_path)


def test_a_long_temporary_folder_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unix sockets have short paths; where TMPDIR is too long, another place is taken."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with SlotGroup(1, working_dir=tmp_path, log_dir=tmp_path) as slots:
        assert slots.request(Ping(), Done) == [Done()]
