"""The slot group with real rank processes, and all the ways in which they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.processes import alive, descendants, kill, wait_until_gone
from tests.support.ranks import ROOT
from tests.support.slots import ONE_TWO_FOUR, OwnSlots, build, toy_config, warm_group
from trial_core.errors import LaunchError, RankFailed, SlotsError
from trial_core.messages import BuildLoadersAndRestore, Done, Ping, ReadyToTrain
from trial_core.processes.slots.fork_server import ForkServer

pytestmark = pytest.mark.slots


@pytest.mark.parametrize("world_size", ONE_TWO_FOUR)
def test_every_rank_answers(tmp_path: Path, world_size: int) -> None:
    """Each rank is a process. No process is left after the block, the fork server included."""
    before = set(descendants(os.getpid()))
    with OwnSlots(world_size, working_dir=tmp_path) as slots:
        assert slots.request(Ping(), Done) == [Done()] * world_size
        pids = set(descendants(os.getpid())) - before
        assert len(pids) == world_size + 1
        assert len(set(slots.pids)) == world_size
    assert alive(pids) == []


def test_a_ranks_environment_does_not_hold_the_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do its children get the pipe through which the driver sends it."""
    secret = b"0123456789abcdef0123456789abcdef"
    monkeypatch.setattr(
        "trial_core.processes.slots.channel.secrets.token_bytes", lambda count: secret
    )
    with OwnSlots(1, working_dir=tmp_path) as slots:
        assert slots.request(Ping(), Done) == [Done()]
        (rank,) = slots.pids
        seen = Path(f"/proc/{rank}/environ").read_bytes()
        assert b"WORLD_SIZE=1" in seen
        assert secret not in seen
        assert secret.hex().encode() not in seen
        assert os.readlink(f"/proc/{rank}/fd/0") == os.devnull


def test_ranks_ignore_sigterm_and_sigint(tmp_path: Path) -> None:
    """The driver decides when ranks end: they may have to save first."""
    with OwnSlots(1, working_dir=tmp_path) as slots:
        slots.request(Ping(), Done)
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(slots.pids[0], number)
        assert slots.request(Ping(), Done) == [Done()]


def test_a_killed_rank_is_named_and_the_others_end(tmp_path: Path) -> None:
    """The request fails with the rank and the signal; a later request fails the same way."""
    with OwnSlots(2, working_dir=tmp_path) as slots:
        os.kill(slots.pids[0], signal.SIGSTOP)  # rank 0 will never answer
        waiting = slots.submit(Ping())
        os.kill(slots.pids[1], signal.SIGKILL)
        with pytest.raises(RankFailed) as failure:
            waiting.result(timeout=10)
        assert (failure.value.rank, failure.value.signal_name) == (1, "SIGKILL")
        assert failure.value.during == "a check of the channel"
        assert wait_until_gone(slots.pids, 10) == []
        with pytest.raises(RankFailed, match=r"rank 1 .* SIGKILL"):
            slots.request(Ping(), Done)


def test_a_rank_that_dies_while_starting_fails_the_launch(tmp_path: Path) -> None:
    """The error has its exit code and its log."""
    (tmp_path / "msgspec.py").write_text("raise SystemExit('cannot start')\n")
    with pytest.raises(RankFailed) as failure:
        OwnSlots(
            2, working_dir=tmp_path, log_dir=tmp_path, environment={"PYTHONPATH": str(tmp_path)}
        )
    assert failure.value.exit_code == 1
    assert failure.value.during == "its start"
    assert "cannot start" in failure.value.report()


def test_a_missing_working_directory_is_a_launch_error(tmp_path: Path) -> None:
    """The message has the folder."""
    with pytest.raises(LaunchError, match=r"cannot start the ranks in .*nowhere"):
        OwnSlots(1, working_dir=tmp_path / "nowhere")


def test_a_result_of_the_wrong_type_is_refused(tmp_path: Path) -> None:
    """`request` raises, instead of a later caller."""
    with (
        OwnSlots(1, working_dir=tmp_path) as slots,
        pytest.raises(SlotsError, match="check of the channel: expected ReadyToTrain"),
    ):
        slots.request(Ping(), ReadyToTrain)


@pytest.mark.long
def test_a_request_out_of_order_is_refused(tmp_path: Path) -> None:
    """Loaders cannot be built before the trial; the rank's message reaches the driver."""
    with OwnSlots(1, working_dir=tmp_path) as slots, pytest.raises(RankFailed) as failure:
        slots.request(BuildLoadersAndRestore(batches_trained=0, checkpoint=None), ReadyToTrain)
    assert failure.value.error_type == "SlotsError"
    assert "must come after build-trial" in str(failure.value)


DRIVER = """
import os
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path
from trial_core.processes.slots.fork_server import ForkServer
from trial_core.processes.slots.launcher import launch_locally
from trial_core.processes.slots.slot_group import SlotGroup

launcher = partial(launch_locally, ForkServer())
slots = SlotGroup(
    2, working_dir=Path(sys.argv[1]), log_dir=Path(tempfile.mkdtemp()), launcher=launcher
)
children = [os.fork()] if sys.argv[2:] == ["fork"] else []
if children == [0]:
    os.closerange(0, 3)
    signal.pause()
print(*slots.pids, *children, flush=True)
sys.stdin.read()
"""

# Runs when a rank starts: its thread for the channel takes the interpreter lock, and keeps it.
HOLDS_THE_INTERPRETER_LOCK = """
import ctypes
from trial_core.processes.slots.connection import RankConnection
RankConnection.receive = lambda self: ctypes.PyDLL(None).pause()
"""


@contextmanager
def driver_of_two_ranks(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A driver of ranks that have joined; `pids_of` reads their process ids."""
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(folder), *arguments],
        env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as driver:
        try:
            yield driver
        finally:
            driver.kill()


def pids_of(driver: subprocess.Popen[str]) -> list[int]:
    """The ranks, and the child that the driver has forked."""
    assert driver.stdout is not None
    return [int(word) for word in driver.stdout.readline().split()]


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
def test_ranks_end_with_their_driver(tmp_path: Path, how: signal.Signals) -> None:
    """No process is left 10 seconds after the driver has ended."""
    with driver_of_two_ranks(tmp_path) as driver:
        assert len(alive(pids_of(driver))) == 2
        started = descendants(driver.pid)
        driver.send_signal(how)
        assert wait_until_gone(started, 10) == []


@pytest.mark.parametrize("they", ["are stopped", "hold the interpreter lock"])
def test_ranks_that_cannot_notice_their_drivers_end_are_killed(tmp_path: Path, they: str) -> None:
    """Another process notices it: they may be in native code for ever."""
    if they == "hold the interpreter lock":
        (tmp_path / "sitecustomize.py").write_text(HOLDS_THE_INTERPRETER_LOCK)
    with driver_of_two_ranks(tmp_path) as driver:
        ranks = pids_of(driver)
        started = descendants(driver.pid)
        try:
            if they == "are stopped":
                for rank in ranks:
                    os.kill(rank, signal.SIGSTOP)
            driver.kill()
            assert wait_until_gone(started, 10) == []
        finally:
            kill(ranks)


@pytest.mark.long
def test_ranks_end_although_a_forked_child_of_their_driver_lives(tmp_path: Path) -> None:
    """The child has copies of the connections to the ranks and to the fork server."""
    with driver_of_two_ranks(tmp_path, "fork") as driver:
        *ranks, child = pids_of(driver)
        started = set(descendants(driver.pid))
        try:
            driver.kill()
            assert wait_until_gone(started - {child}, 10) == []
            assert alive([child]) == [child]
        finally:
            kill([child, *ranks])


def test_a_death_is_noticed_although_a_forked_child_lives(
    warm_server: ForkServer, tmp_path: Path
) -> None:
    """The child has a copy of the connection, so the driver watches the process, too."""
    with warm_group(warm_server, 1) as slots:
        (rank,) = slots.pids
        before = {*descendants(rank)}  # its persister
        build(slots, toy_config(tmp_path, entrypoint="bad_trials:Forks"), tmp_path)
        (child,) = {*descendants(rank)} - before
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(RankFailed, match="SIGKILL"):
            slots.submit(Ping()).result(timeout=10)
    assert wait_until_gone([child], 10) == []


def test_a_callback_that_raises_does_not_end_the_group(tmp_path: Path) -> None:
    """`on_log` raises, and the rank still answers."""
    was_called = threading.Event()

    def failing(rank: int, line: str) -> None:
        was_called.set()
        raise RuntimeError("no room on the screen")

    with OwnSlots(1, working_dir=tmp_path, log_dir=tmp_path, on_log=failing) as slots:
        slots.request(Ping(), Done)  # from here on, the rank forwards new lines
        with (tmp_path / "rank-0.log").open("a") as log:
            log.write("a line\n")
        assert was_called.wait(20)
        assert slots.submit(Ping()).result(timeout=10) == [Done()]


def test_an_interrupt_while_closing_leaves_no_process(tmp_path: Path) -> None:
    """Ctrl-C during the shutdown kills the ranks."""
    slots = OwnSlots(1, working_dir=tmp_path)
    os.kill(slots.pids[0], signal.SIGSTOP)  # so it does not shut down

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


@pytest.mark.long
def test_an_invalid_message_is_the_first_cause(warm_server: ForkServer, tmp_path: Path) -> None:
    """Not the rank's exit, which follows it."""
    config = toy_config(tmp_path, entrypoint="bad_trials:TalksNonsense")
    with warm_group(warm_server, 1) as slots, pytest.raises(RankFailed) as failure:
        build(slots, config, tmp_path)
    assert failure.value.error_type == "ProtocolError"
    assert "sent an invalid message" in str(failure.value)


def test_a_long_temporary_folder_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TMPDIR is too long for a Unix socket, so the channel uses another folder."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with OwnSlots(1, working_dir=tmp_path, log_dir=tmp_path) as slots:
        assert slots.request(Ping(), Done) == [Done()]
