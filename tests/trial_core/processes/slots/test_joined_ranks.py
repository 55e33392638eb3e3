"""A slot group of ranks that another program has started. Real processes, on this machine."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from tests.support.hosts import DRIVER as DRIVER_ADDRESS, new_hosts
from tests.support.joined_ranks import JoinedRanks, group_of, joined_group, joined_ranks
from tests.support.processes import alive
from tests.support.ranks import ROOT
from tests.support.slots import ONE_TWO_FOUR, OwnSlots
from trial_core.errors import CheckpointError, LaunchError, RankFailed, Stalled, Stopped
from trial_core.messages import (
    Done,
    HookDone,
    Invitation,
    PersistCheckpoint,
    Ping,
    RunHook,
    TrainBatches,
    Trained,
)
from trial_core.processes.slots import joined_launcher, slot_group
from trial_core.processes.slots.addresses import ListenAddress
from trial_core.processes.slots.connection import SILENCE_SECONDS
from trial_core.processes.slots.joined_launcher import joining
from trial_core.processes.slots.joined_rank import SAME_CTRL_C_SECONDS

PLACES = pytest.mark.parametrize(
    "remote",
    [pytest.param((), id="here", marks=pytest.mark.long), pytest.param((1,), id="two-machines")],
)


@pytest.mark.parametrize("world_size", ONE_TWO_FOUR)
def test_every_rank_serves_until_the_run_is_over(world_size: int) -> None:
    """Then its program goes on."""
    with joined_group(world_size) as (slots, ranks):
        assert slots.request(Ping(), Done) == [Done()] * world_size
        assert slots.pids == [each.process.pid for each in ranks.ranks]
        trained = slots.request(TrainBatches(until=3), Trained)
        assert [each.batches_trained for each in trained] == [3] * world_size
        slots.close()
        assert [each.ended() for each in ranks.ranks] == [("", "", "")] * world_size
        assert ranks.exit_codes() == [0] * world_size
        assert "closed\n" in ranks[0].said


def test_ranks_of_other_machines_join() -> None:
    """Over TCP with TLS, which the others do not need. Their messages may be large."""
    with joined_group(3, remote=(1, 2)) as (slots, ranks):
        assert slots.request(Ping(), Done) == [Done()] * 3
        large = RunHook(hook="close 7", arguments={"text": "x" * 10**7})
        assert slots.request(large, HookDone) == [HookDone(stop_requested=False)] * 3
        slots.close()
        assert ranks.exit_codes() == [0] * 3


# --------------------------------------------------------------------------------- failures


@PLACES
def test_a_killed_rank_is_named_and_the_others_leave(remote: tuple[int, ...]) -> None:
    """They raise the first cause, also while they sleep in Python, and end within seconds."""
    with joined_group(3, remote) as (slots, ranks):
        waiting = slots.submit(RunHook(hook="sleep"))
        for each in ranks.ranks:
            each.wait_for("begun")
        ranks[1].process.kill()
        with pytest.raises(RankFailed) as failure:
            waiting.result(10)
        assert (failure.value.rank, failure.value.during) == (1, "callbacks sleep")
        assert "rank 1 on" in str(failure.value)
        assert failure.value.log_path == ""
        for rank in (0, 2):
            assert ranks[rank].ended()[:2] == ("RankFailed", str(failure.value))
            assert ranks[rank].process.wait(5) == 1


@PLACES
def test_a_rank_raises_its_own_exception_and_the_others_name_it(remote: tuple[int, ...]) -> None:
    """The user's class, with its traceback in the driver."""
    with joined_group(2, remote) as (slots, ranks):
        with pytest.raises(RankFailed) as failure:
            slots.request(RunHook(hook="fail 1"), HookDone)
        assert (failure.value.rank, failure.value.error_type) == (1, "UsersError")
        assert "in fail" in (failure.value.rank_traceback or "")
        assert ranks[1].ended() == ("UsersError", "on rank 1", "NoneType")
        assert ranks[0].ended()[:2] == ("RankFailed", str(failure.value))
        assert ranks.exit_codes() == [1, 1]


def test_the_first_cause_is_raised_in_place_of_its_consequence() -> None:
    """All ranks fail, rank 1 first: the others' exceptions are the context of the first cause."""
    with joined_group(2) as (slots, ranks):
        os.kill(ranks[0].process.pid, signal.SIGSTOP)  # rank 0 fails later
        waiting = slots.submit(RunHook(hook="fail"))
        ranks[1].wait_for("begun")
        time.sleep(0.3)
        os.kill(ranks[0].process.pid, signal.SIGCONT)
        with pytest.raises(RankFailed, match="rank 1"):
            waiting.result(10)
        assert ranks[1].ended()[0] == "UsersError"
        kind, _, cause = ranks[0].ended()
        assert (kind, cause) == ("RankFailed", "UsersError")


def test_an_exception_of_the_io_lane_is_raised_in_the_main_thread() -> None:
    """On its rank as itself."""
    with joined_group(1) as (slots, ranks):
        with pytest.raises(RankFailed, match="UsersError: in the I/O lane"):
            slots.request(PersistCheckpoint(uuid="u"), Done)
        assert ranks[0].ended()[:2] == ("UsersError", "in the I/O lane")


def test_an_exception_outside_of_workloads_is_reported() -> None:
    """For example of what a script does between joining and serving."""
    with (
        pytest.raises(RankFailed, match=r"rank 0 on .* raised ZeroDivisionError: division by zero"),
        joined_group(1, before="1 / 0") as (slots, _),
    ):
        slots.request(Ping(), Done)


def test_ranks_whose_shutdown_fails_are_not_waited_for() -> None:
    """Each raises its own error and leaves; the run is over."""
    with joined_group(2, before="Work.close = lambda self: 1 / 0") as (slots, ranks):
        slots.request(Ping(), Done)
        began = time.monotonic()
        slots.close()
        assert time.monotonic() - began < slot_group.SHUTDOWN_SECONDS / 2
        assert [each.ended()[0] for each in ranks.ranks] == ["ZeroDivisionError"] * 2


def test_an_error_of_the_driver_is_raised_by_every_rank() -> None:
    """With its class, also if a workload runs."""

    def drive(ranks: JoinedRanks, hook: str | None) -> None:
        with group_of(ranks) as slots:
            if hook is not None:
                slots.submit(RunHook(hook=hook))
                ranks[1].wait_for("begun")
            raise CheckpointError("cannot be stored")

    for hook in (None, "sleep"):
        with joined_ranks(2) as ranks:
            with pytest.raises(CheckpointError):
                drive(ranks, hook)
            for each in ranks.ranks:
                assert each.ended() == ("CheckpointError", "cannot be stored", "NoneType")


def test_ranks_that_do_not_join_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the driver, and to those that have joined."""
    monkeypatch.setattr(slot_group, "JOIN_SECONDS", 4.0)
    with joined_ranks(1) as ranks:
        launcher = joining(ranks.invite)
        with pytest.raises(LaunchError, match=r"^rank 1 did not join within 4 s$"):
            OwnSlots(2, working_dir=Path(), launcher=launcher)
        assert ranks[0].ended()[:2] == ("LaunchError", "rank 1 did not join within 4 s")
        with pytest.raises(LaunchError, match="cannot be started again: another program"):
            OwnSlots(2, working_dir=Path(), launcher=launcher)


def test_a_death_is_noticed_although_a_forked_child_has_the_connection() -> None:
    """The driver watches the process, too."""
    with joined_group(1) as (slots, ranks):
        slots.request(RunHook(hook="fork"), HookDone)
        ranks[0].process.kill()
        with pytest.raises(RankFailed, match="rank 0"):
            slots.submit(Ping()).result(10)


# ------------------------------------------------------------------- ranks that cannot raise


def test_a_rank_that_waits_in_native_code_ends_by_itself() -> None:
    """A collective that never completes; on this machine and on others."""
    with joined_group(3, remote=(2,)) as (slots, ranks):
        waiting = slots.submit(RunHook(hook="wait"))
        for each in ranks.ranks:
            each.wait_for("begun")
        ranks[1].process.kill()
        with pytest.raises(RankFailed, match="rank 1"):
            waiting.result(10)
        assert ranks[0].process.wait(15) == 1
        assert ranks[2].process.wait(15) == 1


def test_a_rank_that_holds_the_interpreter_lock_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the driver. Its stack is known before."""
    monkeypatch.setattr(joined_launcher, "LEAVE_SECONDS", 1.0)
    with joined_group(2) as (slots, ranks), pytest.raises(Stalled) as stall:
        slots.request(RunHook(hook="hold 1"), HookDone, stall_seconds=1.0)
    assert "in hold" in stall.value.stacks[1]
    assert "in serve" in stall.value.stacks[0]
    assert ranks[0].process.returncode != -signal.SIGKILL
    assert ranks[1].process.returncode == -signal.SIGKILL


@pytest.mark.long
@pytest.mark.parametrize("hook", ["hold", "wait"])
def test_an_interactive_process_is_left_alone(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook's kernel has more than this run. The driver does not wait for it."""
    monkeypatch.setattr(joined_launcher, "LEAVE_SECONDS", 7.0)  # longer than END_SECONDS
    with joined_group(1, is_interactive=True) as (slots, ranks):
        with pytest.raises(Stalled):
            slots.request(RunHook(hook=hook), HookDone, stall_seconds=1.0)
        slots.close()
        assert alive([ranks[0].process.pid]) == [ranks[0].process.pid]


def test_an_interactive_rank_raises_and_lives() -> None:
    """If its main thread is in Python code. It can join the next run."""
    with joined_group(1, is_interactive=True, stays=True) as (slots, ranks):
        with pytest.raises(Stalled):
            slots.request(RunHook(hook="sleep"), HookDone, stall_seconds=1.0)
        slots.close()
        assert ranks[0].ended()[0] == "Stalled"
        assert alive([ranks[0].process.pid]) == [ranks[0].process.pid]


def test_hung_ranks_of_other_machines_tell_their_stacks(tmp_path: Path) -> None:
    """By a message. They are written where those of the others are."""
    with joined_group(2, remote=(1,), log_dir=tmp_path) as (slots, _), pytest.raises(Stalled) as e:
        slots.request(RunHook(hook="wait"), HookDone, stall_seconds=1.0)
    for rank in (0, 1):
        assert "in wait" in e.value.stacks[rank]
        assert "in wait" in (tmp_path / f"rank-{rank}.stacks").read_text()


def test_what_a_rank_writes_is_progress(tmp_path: Path) -> None:
    """It tells the driver, which may be on another machine."""
    often = "from trial_core.processes.slots import joined_rank; joined_rank.WATCH_SECONDS = 0.2"
    with joined_group(2, (1,), first=often, file=str(tmp_path / "file")) as (slots, _):
        slots.request(RunHook(hook="write 1"), HookDone, stall_seconds=3.0)


# ---------------------------------------------------------------------------- a lost driver

DRIVER = """
import sys
import tempfile
from pathlib import Path
import msgspec
from trial_core.messages import RunHook
from trial_core.processes.slots.connection import SILENCE_SECONDS
from trial_core.processes.slots.joined_launcher import joining
from trial_core.processes.slots.joined_rank import SAME_CTRL_C_SECONDS
from trial_core.processes.slots.addresses import ListenAddress
from trial_core.processes.slots.addresses import ListenAddress
from trial_core.processes.slots.slot_group import SlotGroup

def invite(invitation):
    print(msgspec.msgpack.encode(invitation).hex(), flush=True)

launcher = joining(invite, ListenAddress("127.0.0.1"))
logs = Path(tempfile.mkdtemp())
ranks = int(sys.argv[1])
with SlotGroup(ranks, working_dir=Path(), log_dir=logs, launcher=launcher) as slots:
    slots.submit(RunHook(hook=sys.argv[2])).result()
"""


@pytest.mark.parametrize(
    ("hook", "ends"),
    [("sleep", "raise"), ("sleep 1", "raise"), ("wait", "exit")],
    ids=["in-python", "between-requests", "in-native-code"],
)
def test_ranks_leave_when_their_driver_is_killed(hook: str, ends: str) -> None:
    """Each raises an error of ours, or ends if it cannot; on this machine and on others."""
    with (
        joined_ranks(2) as ranks,
        subprocess.Popen(
            [sys.executable, "-c", DRIVER, "2", hook],
            env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
        ) as driver,
    ):  # fmt: skip
        assert driver.stdout is not None
        told = bytes.fromhex(driver.stdout.readline())
        ranks.invite(msgspec.msgpack.decode(told, type=Invitation), remote=(1,))
        ranks[1].wait_for("begun")
        driver.kill()
        if ends == "raise":
            for each in ranks.ranks:
                assert each.ended()[:2] == ("SlotsError", "the driver is gone")
        assert [each.process.wait(10) for each in ranks.ranks] == [1, 1]


@pytest.mark.long
def test_a_machine_that_is_cut_off_is_lost(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The driver names it, and its rank ends; both notice within seconds that it is silent."""
    with new_hosts(tmp_path_factory.mktemp("hosts")) as hosts:
        host = hosts.add()
        with (
            joined_ranks(2, hosts=["", host]) as ranks,
            group_of(ranks, (1,), listen=ListenAddress(DRIVER_ADDRESS)) as slots,
        ):
            waiting = slots.submit(RunHook(hook="sleep"))
            ranks[1].wait_for("begun")
            hosts.cut(host)
            with pytest.raises(RankFailed, match=r"rank 1 on .* was lost with its node: its conn"):
                waiting.result(SILENCE_SECONDS + 15)
            assert ranks[1].ended()[:2] == ("SlotsError", "the driver is gone")
            assert ranks.exit_codes() == [1, 1]


# ------------------------------------------------------------------------------------ stops


@pytest.mark.parametrize(
    ("hook", "number", "reason"),
    [
        ("sleep", signal.SIGINT, "interrupted"),
        ("wait", signal.SIGTERM, "preempted"),
        pytest.param("sleep", signal.SIGTERM, "preempted", marks=pytest.mark.long),
        pytest.param("wait", signal.SIGINT, "interrupted", marks=pytest.mark.long),
    ],
)
def test_a_signal_to_any_rank_reaches_the_driver(
    hook: str, number: signal.Signals, reason: str
) -> None:
    """At once, whatever its main thread does."""
    asked: queue.Queue[tuple[str, str]] = queue.Queue()

    def ask(reason: str, detail: str) -> None:
        asked.put((reason, detail))

    with joined_ranks(2) as ranks, group_of(ranks, (1,), on_stop_signal=ask) as slots:
        slots.submit(RunHook(hook=hook))
        ranks[1].wait_for("begun")
        ranks[1].process.send_signal(number)
        assert asked.get(timeout=5) == (reason, number.name)
        assert alive(each.process.pid for each in ranks.ranks) == slots.pids
        slots.abort("the grace period is over")


def test_all_ranks_stop_after_the_same_batch() -> None:
    """At the signal, if nothing else is asked."""
    with joined_group(2) as (slots, ranks):
        training = slots.submit(TrainBatches(until=10**6))
        time.sleep(0.5)
        ranks[1].process.terminate()
        first, second = (each.batches_trained for each in training.result(10))  # type: ignore[attr-defined]
        assert 0 < first == second < 10**6


def test_the_ranks_raise_why_they_were_ended() -> None:
    """For example at the end of the grace period."""
    with joined_group(1) as (slots, ranks):
        waiting = slots.submit(RunHook(hook="sleep"))
        ranks[0].wait_for("begun")
        slots.abort("the grace period is over")
        with pytest.raises(Stopped):
            waiting.result(10)
        assert ranks[0].ended()[:2] == ("Stopped", "the grace period is over")


def test_a_later_ctrl_c_raises_keyboard_interrupt() -> None:
    """As in any program; the driver learns of it. The first one may arrive twice."""
    asked: queue.Queue[str] = queue.Queue()

    def ask(reason: str, detail: str) -> None:
        asked.put(detail)

    with joined_ranks(1) as ranks, group_of(ranks, on_stop_signal=ask) as slots:
        waiting = slots.submit(RunHook(hook="sleep"))
        ranks[0].wait_for("begun")
        for _ in range(2):
            ranks[0].process.send_signal(signal.SIGINT)
            assert asked.get(timeout=5) == "SIGINT"
        time.sleep(2 * SAME_CTRL_C_SECONDS)  # the rank may have noted it later than the driver
        assert alive(slots.pids) == slots.pids
        ranks[0].process.send_signal(signal.SIGINT)
        assert ranks[0].ended()[0] == "KeyboardInterrupt"
        with pytest.raises(RankFailed, match=r"rank 0 on .* raised KeyboardInterrupt"):
            waiting.result(10)


def test_signals_have_their_usual_effect_afterwards() -> None:
    """And in a process that was forked meanwhile: it is no rank."""
    asked: queue.Queue[str] = queue.Queue()

    def ask(reason: str, detail: str) -> None:
        asked.put(detail)

    with joined_ranks(1, stays=True) as ranks:
        with group_of(ranks, on_stop_signal=ask) as slots:
            slots.request(RunHook(hook="terminate_child"), HookDone)
            assert ranks[0].wait_for("child") == str(-signal.SIGTERM)
        assert ranks[0].ended() == ("", "", "")
        ranks[0].process.terminate()
        assert ranks.exit_codes() == [-signal.SIGTERM]
    assert asked.empty()


def test_a_rank_serves_in_another_thread_than_the_main_thread() -> None:
    """Without signals. It leaves as others do; if the run fails, at its next step."""
    with joined_group(1, in_thread=True) as (slots, ranks):
        assert slots.request(Ping(), Done) == [Done()]
        slots.close()
        assert ranks[0].ended() == ("", "", "")
    with joined_group(2, in_thread=True) as (slots, ranks):
        training = slots.submit(TrainBatches(until=10**6))
        ranks[1].process.kill()
        with pytest.raises(RankFailed, match="rank 1"):
            training.result(10)
        assert ranks[0].ended()[0] == "RankFailed"
