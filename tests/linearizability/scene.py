"""Plays histories: processes that act at the same time on a real gateway, with faults between.

Each process has its own way to the gateway, through a proxy that fails at random: requests are cut
before the gateway has them, replies are lost, answers are 503, data is slow, and a create-only
write arrives after its client has given up. A fault may kill the process that sent the request.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.linearizability.actor import SUBJECTS
from tests.linearizability.history import Event, check_by, read_events
from tests.support.faults.plan import Fault, Plan, Seen
from tests.support.faults.s3 import FaultyS3, faulty_s3
from tests.support.manifests import commit_files
from tests.support.s3 import S3Server
from trial_core.checkpoint.store import CheckpointStore

ROOT = Path(__file__).parents[2]
ROUND_SECONDS = 300.0
"""The longest time of a round: then the test fails."""


class RandomPlan(Plan):
    """Faults at random.

    Args:
        share: how many of the requests meet one.
        kills: how many processes may be killed.
        is_late: whether a create-only write may arrive late: only where clients do not send it
            again at once.
    """

    def __init__(self, choose: random.Random, share: float, kills: int, is_late: bool) -> None:
        super().__init__()
        self._choose, self._share, self._kills, self._is_late = choose, share, kills, is_late

    def next(self, client: str, method: str, key: str) -> Seen:
        """Count a request, which may meet a fault."""
        with self._lock:
            seen = Seen(len(self.seen), client, method, key, self._fault(method, key))
            self.seen.append(seen)
            return seen

    def _fault(self, method: str, key: str) -> Fault | None:
        if self._choose.random() >= self._share:
            return None
        if self._kills and self._choose.random() < 0.1:
            self._kills -= 1
            return Fault(self._choose.choice(["kill before", "kill after"]))
        is_numbered = any(f"/{each}/" in key for each in ("manifests", "attempts", "models"))
        if self._is_late and method == "PUT" and is_numbered and self._choose.random() < 0.5:
            return Fault("late")
        slow = Fault("slow", bytes_per_second=30_000)
        others = (Fault("cut request"), Fault("lose reply"), Fault("503"), slow, slow, slow)
        return self._choose.choice(others)


def prepare(subject: str, store: CheckpointStore, name: str) -> list[str]:
    """Store what a round acts on; its keys.

    Args:
        name: of a trial or a model.
    """
    if subject == "owners":
        commit_files(store, 7, files={"model": b"weights"}, trial=name)
    if subject in ("trials", "owners"):
        return [name]
    made = [
        commit_files(store, batches, files={"model": b"weights"}, trial="gpt-1").uuid
        for batches in (7, 11, 13)
    ]
    return made[:2] if subject == "protections" else [name]


def histories(folder: Path, keys: Iterable[str]) -> dict[str, list[Event]]:
    """The history of each key that processes have recorded in a folder."""
    found: dict[str, list[Event]] = {key: [] for key in keys}
    for event in read_events(sorted(folder.glob("*.jsonl"))):
        if event.key in found:
            found[event.key].append(event)
    return found


def check_histories(subject: str, events: Mapping[str, list[Event]]) -> None:
    """Check the history of each key. Raises as `checker.check`."""
    model = SUBJECTS[subject]
    for key, of_key in events.items():
        check_by(model, key, of_key)


@dataclass
class _Process:
    """An actor: see `actor`."""

    number: int
    options: dict[str, Any]
    process: subprocess.Popen[bytes]

    def send(self, **play: Any) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it was killed
            self.process.stdin.write(json.dumps(play).encode() + b"\n")
            self.process.stdin.flush()

    def wait(self) -> bool:
        """Wait for the end of the round; whether the process lives."""
        assert self.process.stdout is not None
        is_ready, _, _ = select.select([self.process.stdout], [], [], ROUND_SECONDS)
        assert is_ready, f"process {self.number} did not end its round"
        if self.process.stdout.readline():
            return True
        code = self.process.wait()
        assert code == -signal.SIGKILL, f"process {self.number} ended with {code}"
        return False


@dataclass
class Scene:
    """Processes, their proxy, and what has been counted.

    Attributes:
        counts: histories, operations, those without a known outcome, faults by kind.
    """

    proxy: FaultyS3
    folder: Path
    processes: dict[int, _Process] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    _started: int = 0

    def play(
        self,
        subject: str,
        seed: int,
        *,
        processes: int = 3,
        operations: int = 8,
        share: float = 0.1,
        kills: int = 0,
        mistake: str = "",
    ) -> None:
        """Play one round and check its histories.

        Args:
            subject: one of `SUBJECTS`.
            share: of the requests that meet a fault.
            kills: how many processes may be killed.
            mistake: see `actor.MISTAKES`.

        Raises:
            NotLinearizable: a history has no order; shows it.
        """
        choose = random.Random(seed)
        url = f"{self.proxy.backend.new_bucket()}/{subject}"
        store = CheckpointStore(url, self.proxy.backend.options)
        keys = prepare(subject, store, f"round-{seed}")
        self.proxy.on_kill = self._kill
        for number in range(processes):
            if number not in self.processes:
                self.processes[number] = self._start(number)
        retries = choose.choice([1, 3])
        plan = RandomPlan(choose, share, kills, is_late=retries == 1)
        self.proxy.new_plan()
        self.proxy.plan = plan
        for process in self.processes.values():
            process.send(
                subject=subject, url=url, options=process.options, seed=choose.random(),
                keys=keys, process=process.number, operations=operations, retries=retries,
                mistake=mistake,
            )  # fmt: skip
        dead = [number for number, each in self.processes.items() if not each.wait()]
        for number in dead:
            del self.processes[number]
        self.proxy.new_plan()
        self.counts["killed"] += len(dead)
        self.counts.update(str(each.fault.kind) for each in plan.struck() if each.fault)
        events = histories(self.folder, keys)
        self.counts["histories"] += len(events)
        for of_key in events.values():
            self.counts["operations"] += len(of_key)
            self.counts["unknown outcomes"] += sum(not each.is_known for each in of_key)
        check_histories(subject, events)

    def _start(self, number: int) -> _Process:
        self._started += 1
        name = f"{number}-{self._started}"
        command = (
            sys.executable, "-m", "tests.linearizability.actor",
            str(self.folder / f"{name}.jsonl"), name,
        )  # fmt: skip
        with open(self.folder / f"{name}.log", "wb") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        options = {
            **self.proxy.server(str(process.pid)).options,
            "config_kwargs": {"retries": {"max_attempts": 0}},  # s3fs alone repeats requests
        }
        return _Process(number, options, process)

    def _kill(self, seen: Seen) -> None:
        os.kill(int(seen.client), signal.SIGKILL)

    def close(self) -> None:
        """End the processes."""
        for each in self.processes.values():
            each.process.kill()
            each.process.communicate()


@contextmanager
def scene(gateway: S3Server, folder: Path) -> Iterator[Scene]:
    """A scene within the block."""
    with faulty_s3(gateway) as proxy:
        made = Scene(proxy, folder)
        try:
            yield made
        finally:
            made.close()
