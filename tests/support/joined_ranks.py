"""Ranks that join a driver by themselves: processes of plain Python, without PyTorch."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tests.support.ranks import ROOT
from trial_core.messages import Invitation
from trial_core.processes.slots.addresses import LOOPBACK_ADDRESS, ListenAddress
from trial_core.processes.slots.joined_launcher import joining
from trial_core.processes.slots.slot_group import SlotGroup

END_SECONDS = 30.0
HERE = ListenAddress(LOOPBACK_ADDRESS)

# The name of a hook says what the ranks do, or which rank does it: ``fail 1``.
RANK = """
import ctypes, json, os, sys, threading, time
import msgspec
from trial_core.messages import (
    BatchesTrained, Done, HookDone, Invitation, PersistCheckpoint, TrainBatches, Trained
)
from trial_core.processes.slots.joined_rank import JoinedRank

rank, options = int(sys.argv[1]), json.loads(sys.argv[2])


def say(*words):  # at once: an exception may come between any two instructions
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())


class UsersError(Exception):
    pass


class Work:
    def __init__(self, joined):
        self.joined, self.batches_trained = joined, 0

    def carry_out(self, request):
        if isinstance(request, TrainBatches):
            return self.train(request.until)
        if isinstance(request, PersistCheckpoint):
            raise UsersError("in the I/O lane")
        what, _, where = request.hook.partition(" ")
        if not where or rank == int(where):
            say("begun", what)
            getattr(self, what)()
        return HookDone(stop_requested=False)

    def train(self, until):
        barrier = self.joined.stop_barrier
        barrier.begin_workload()
        while self.batches_trained < until and barrier.may_begin_step():
            time.sleep(0.01 * (1 + rank))
            self.batches_trained += 1
            if rank == 0:
                self.joined.send(BatchesTrained(batches=self.batches_trained))
        return Trained(
            batches_trained=self.batches_trained, metrics={}, seconds=0.0, stop_requested=False
        )

    def fail(self):
        raise UsersError(f"on rank {rank}")

    def sleep(self):  # in Python
        while True:
            time.sleep(0.1)

    def wait(self):  # in C, as in a collective: a signal does not end it
        end = time.monotonic() + 60
        while time.monotonic() < end:
            ctypes.CDLL(None).sleep(60)

    def hold(self):  # the interpreter lock
        library = ctypes.PyDLL(None)
        for _ in range(60):
            library.sleep(60)

    def fork(self):  # in C: the child has a copy of the connection
        if ctypes.CDLL(None).fork() == 0:
            ctypes.CDLL(None).sleep(60)
            os._exit(0)

    def terminate_child(self):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writing, b"x")
            time.sleep(60)
            os._exit(0)
        os.read(reading, 1)
        os.kill(child, 15)
        say("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    def write(self):  # to a disk, longer than the stall timeout
        with open(options["file"], "wb", buffering=0) as file:
            for _ in range(30):
                file.write(bytes(2**16))
                time.sleep(0.2)

    def close(self):
        say("closed")


def fit():
    exec(options.get("first", ""))
    invitation = msgspec.msgpack.decode(bytes.fromhex(sys.stdin.readline()), type=Invitation)
    with JoinedRank(invitation, rank, options.get("is_interactive")) as joined:
        exec(options.get("before", ""))
        joined.serve(Work(joined))


def main():
    try:
        fit()
    except BaseException as error:
        cause = error.__cause__
        say("ended", json.dumps([type(error).__name__, str(error), type(cause).__name__]))
        if options.get("stays"):
            time.sleep(60)
        raise
    say("ended", json.dumps(["", "", ""]))
    if options.get("stays"):
        time.sleep(60)


if options.get("in_thread"):
    thread = threading.Thread(target=main)
    thread.start()
    thread.join()
else:
    main()
"""


@dataclass
class RankProcessOfTest:
    """One process.

    Attributes:
        said: the lines that it has written.
    """

    process: subprocess.Popen[str]
    said: list[str] = field(default_factory=list)

    def wait_for(self, word: str) -> str:
        """The rest of the next line that begins with a word."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line)
            if line.split()[0] == word:
                return line.partition(" ")[2].strip()
        raise AssertionError(f"the rank has not said {word}, but {self.said}")

    def ended(self) -> tuple[str, str, str]:
        """How `serve` has ended: the error's class and text, and the class of its cause."""
        kind, text, cause = json.loads(self.wait_for("ended"))
        return kind, text, cause


class JoinedRanks:
    """Some processes that wait for an invitation."""

    def __init__(self, world_size: int, hosts: Sequence[str], options: Mapping[str, Any]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        within = [["ip", "netns", "exec", host] if host else [] for host in hosts]
        self.ranks = [
            RankProcessOfTest(
                subprocess.Popen(
                    [*command, sys.executable, "-c", RANK, str(rank), json.dumps(options)],
                    env={**os.environ, "PYTHONPATH": str(ROOT)},
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                    text=True, start_new_session=True,
                )
            )
            for rank, command in enumerate(within or [[]] * world_size)
        ]  # fmt: skip

    def invite(self, invitation: Invitation, remote: Sequence[int] = ()) -> None:
        """Tell them where to join; some as on another machine.

        That machine shares the driver's folder, as with a TMPDIR on a shared file system.
        """
        for rank, each in enumerate(self.ranks):
            own = invitation
            if rank in remote:
                seen = f"{self._folder.name}/{rank}"
                with socket.socket(socket.AF_UNIX) as closed:
                    closed.bind(seen)  # the file stays, and nobody listens
                own = msgspec.structs.replace(invitation, path=seen, log_dir="/nowhere")
            assert each.process.stdin is not None
            each.process.stdin.write(msgspec.msgpack.encode(own).hex() + "\n")
            each.process.stdin.flush()

    def __getitem__(self, rank: int) -> RankProcessOfTest:
        return self.ranks[rank]

    def exit_codes(self) -> list[int]:
        """Wait until all have ended."""
        return [each.process.wait(END_SECONDS) for each in self.ranks]

    def close(self) -> None:
        """Kill them, and what they have started."""
        for each in self.ranks:
            with suppress(ProcessLookupError):
                os.killpg(each.process.pid, signal.SIGKILL)
            each.process.communicate()
        self._folder.cleanup()


@contextmanager
def joined_ranks(
    world_size: int, hosts: Sequence[str] = (), **options: Any
) -> Iterator[JoinedRanks]:
    """Processes without a driver.

    Args:
        hosts: that of each rank (`tests.support.hosts`); empty: here.
    """
    ranks = JoinedRanks(world_size, hosts, options)
    try:
        yield ranks
    finally:
        ranks.close()


@contextmanager
def group_of(
    ranks: JoinedRanks,
    remote: Sequence[int] = (),
    log_dir: Path | None = None,
    listen: ListenAddress = HERE,
    **group: Any,
) -> Iterator[SlotGroup]:
    """A slot group that some processes have joined.

    Args:
        remote: ranks that join as from another machine.
        group: arguments of the group.
    """
    with tempfile.TemporaryDirectory() as folder:
        launcher = joining(
            lambda invitation: ranks.invite(invitation, remote),
            listen if remote else None,
        )
        with SlotGroup(
            len(ranks.ranks),
            working_dir=Path(folder),
            log_dir=log_dir or Path(folder),
            launcher=launcher,
            **group,
        ) as slots:
            yield slots


@contextmanager
def joined_group(
    world_size: int, remote: Sequence[int] = (), log_dir: Path | None = None, **options: Any
) -> Iterator[tuple[SlotGroup, JoinedRanks]]:
    """Processes that have joined a slot group. The arguments are those of the other two."""
    with joined_ranks(world_size, **options) as ranks, group_of(ranks, remote, log_dir) as slots:
        yield slots, ranks
