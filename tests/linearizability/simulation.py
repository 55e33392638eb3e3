"""A simulation: processes, a storage, a network and a clock in one thread, all drawn from a seed.

The product's code runs as it is, above `Storage`'s primitives: each process is a greenlet, and each
request to the storage is a point at which the scheduler chooses who continues. A request or its
reply may be lost, come late, come twice, or be slow; the storage may keep what it was told to
delete; and the process may be killed there. The clock advances with requests, and when a process
waits. Each history has a weather of its own: which of these happen, and how often. The same seed
gives the same history.
"""

from __future__ import annotations

import bisect
import getpass
import json
import logging
import random
import socket
import time
import uuid as uuids
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone, tzinfo
from functools import partial
from typing import Any
from unittest import mock

from greenlet import GreenletExit, getcurrent, greenlet  # type: ignore[import-untyped]

from tests.linearizability.history import Event, Recorder, events_of
from trial_core.checkpoint import commit, fencing, json_objects, layout, manifest, store
from trial_core.checkpoint.retention import claims, deletion_markers, trial_owner
from trial_core.checkpoint.storage import base, parallel
from trial_core.checkpoint.store import CheckpointStore

BEGIN = datetime(2031, 5, 9, tzinfo=timezone.utc)
TURNS = (0.5, 0.2, 0.1, 0.05, 0.03)
"""How likely it is that another process has the next request: one of them for a whole history."""
CHECKED = (f"{layout.MANIFESTS}/", f"{layout.CHECKPOINTS}/")
"""Whether these objects are gone is looked at after their deletion."""
LIMIT = 20_000
"""Requests after which a history counts as endless."""
LATEST = 3600.0
"""Seconds without any request, within which all that is late has come."""
ROOT = "simulated"
MOST_BYTES = 20_000
"""Of a small object: see `base.MAX_OBJECT_BYTES`."""


class Killed(GreenletExit):  # type: ignore[misc]
    """Ends a process. As after SIGKILL, nothing that its code does at its end has an effect."""


@dataclass
class Weather:
    """How likely a request meets each fault; whether late writes may be of any key.

    Attributes:
        pages: how many keys a listing reads at a time; None: all at one moment.
        slow: seconds that a slow answer may take.
        sleeps: whether processes let hours or weeks pass.
        tells_times: whether listings have the times of objects.
        tries: how often the product tries again what others have won, or waits for others; None:
            as often as it does.
    """

    faults: dict[str, float]
    turns: float
    pages: int | None
    slow: tuple[float, ...]
    sleeps: bool
    tells_times: bool
    tries: int | None

    @classmethod
    def drawn(cls, choose: random.Random, is_harsh: bool) -> Weather:
        """Each fault is absent from half of the histories, so that rare ones meet alone, too."""
        kinds = (
            "cut request", "lose reply", "late", "twice", "slow", "kill before", "kill after",
            *(["stall"] if is_harsh else []),
        )  # fmt: skip
        share = choose.choice((0.0, 0.01, 0.03, 0.1))
        faults = {kind: share for kind in kinds if choose.random() < 0.5}
        for kind in ("kill before", "kill after"):
            faults[kind] = faults.get(kind, 0.0) / 5
        if is_harsh and choose.random() < 0.2:
            faults["not deleted"] = 0.05
        return cls(
            faults,
            turns=choose.choice(TURNS),
            pages=choose.choice((None, None, 1, 3)) if is_harsh else None,
            slow=(1.0, 60.0, 2000.0) if is_harsh else (1.0,),
            sleeps=choose.random() < 0.5,
            tells_times=not is_harsh or choose.random() < 0.6,
            tries=choose.choice((None, 1, 1, 2)) if is_harsh else None,
        )


@dataclass
class _Process:
    number: int
    is_dead: bool = False

    @property
    def machine(self) -> int:
        return self.number % 3

    body: Any = None
    wakes_at: float = 0.0


@dataclass
class Simulation:
    """The world of one history.

    Attributes:
        objects: what is stored: the bytes, and when they were written.
        unfinished: the keys of unfinished uploads by a number, and when they began.
        on_request: called with the key before each request of a process.
        on_write, on_delete: called when a request has its effect.
        may_be_late: whether a write of this key may come late or twice.
        is_harsh: whether listings may be read in pages, and answers take longer than a deletion
            may.
        counts: of requests, and of faults by kind.
        kept: what no process may finalize: the open contexts of one that was killed.
    """

    seed: int
    may_be_late: Callable[[str], bool]
    is_harsh: bool = False
    most_faults: int = 1000
    objects: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    unfinished: dict[int, tuple[str, float]] = field(default_factory=dict)
    on_request: Callable[[str], None] = lambda key: None
    on_write: Callable[[str, bytes], None] = lambda key, data: None
    on_delete: Callable[[str], None] = lambda key: None
    counts: Counter[str] = field(default_factory=Counter)
    lines: list[str] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    seconds: float = 0.0
    steps: int = 0
    is_over: bool = False
    kept: list[Any] = field(default_factory=list)
    _late: list[tuple[int, str, Callable[[], Any]]] = field(default_factory=list)
    _processes: dict[Any, _Process] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.choose = random.Random(f"{self.seed}")
        self.weather = Weather.drawn(self.choose, self.is_harsh)
        self._main = getcurrent()

    # ---------------------------------------------------------------------------- processes

    def run(self, body: Callable[[int], None], processes: int) -> None:
        """Run processes to their ends; one that is killed is started again, once, as a new one.

        Args:
            body: what a process does, by its number.
        """
        for number in range(processes):
            self._start(body, number)
        turn = 0
        while self._processes:
            self.steps += 1
            assert self.steps < LIMIT, "a history does not end"
            self._deliver(self.steps)
            alive = list(self._processes.items())
            if turn >= len(alive) or self.choose.random() < self.weather.turns:
                turn = self.choose.randrange(len(alive))
            body_of, process = alive[turn]
            if process.wakes_at > self.seconds:
                awake = [i for i, (_, each) in enumerate(alive) if each.wakes_at <= self.seconds]
                if awake:
                    turn = self.choose.choice(awake)
                    body_of, process = alive[turn]
                else:
                    wakes_at = min(each.wakes_at for _, each in alive)
                    if wakes_at - self.seconds > LATEST:
                        self._deliver(LIMIT)
                    self.seconds = wakes_at
                    continue
            self.seconds += self.choose.choice((0.001, 0.01, 0.1))
            body_of.switch()
            if body_of.dead:
                del self._processes[body_of]
                if process.is_dead and process.number < processes:
                    self._start(body, process.number + processes)
        self._deliver(LIMIT)
        self.is_over = True

    def _start(self, body: Callable[[int], None], number: int) -> None:
        made = greenlet(partial(body, number), self._main)
        self._processes[made] = _Process(number)

    def _deliver(self, step: int) -> None:
        """What comes late."""
        while self._late and self._late[0][0] <= step:
            _, text, effect = self._late.pop(0)
            self._note(f"late      {text}")
            with suppress(OSError):
                effect()

    def sleep(self, seconds: float) -> None:
        """What `time.sleep` is for a process."""
        process = self._processes.get(getcurrent())
        if process is None:
            _sleep(seconds)
            return
        process.wakes_at = self.seconds + seconds
        self._main.switch()

    def request(self, verb: str, key: str, effect: Callable[[], Any], writes: bool = False) -> Any:
        """A request of a process, with what happens to it. Outside of processes, just the effect.

        Args:
            writes: whether it changes what is stored.
        """
        process = None if self.is_over else self._processes.get(getcurrent())
        if process is None:
            return effect()
        if process.is_dead:
            raise Killed
        self._main.switch()
        self.on_request(key)
        text = f"{process.number} {verb} {key}"
        fault = self._fault(verb, writes, key)
        self.counts["requests"] += 1
        self.counts[fault] += 1
        self._note(f"{fault:9.9} {text}")
        if fault == "cut request":
            raise ConnectionError("simulated: the request was lost")
        if fault == "stall":  # others go on; all of it is shorter than a deletion may take
            self.sleep(self.choose.choice((10.0, 600.0)))
        if fault == "kill before":
            process.is_dead = True
            raise Killed
        if fault in ("late", "twice"):
            due = self.steps + int(self.choose.expovariate(1 / self.choose.choice((5, 50, 500))))
            bisect.insort(self._late, (due, text, effect), key=lambda each: each[0])
        if fault == "late":
            raise TimeoutError("simulated: no answer")
        try:
            return None if fault == "not deleted" else effect()
        finally:
            if fault == "slow":
                self.seconds += self.choose.choice(self.weather.slow)
                self._main.switch()
            if fault == "kill after":
                process.is_dead = True
                raise Killed
            if fault == "lose reply":
                raise ConnectionError("simulated: the reply was lost")

    def _fault(self, verb: str, writes: bool, key: str) -> str:
        left = self.choose.random()
        if self.counts.total() - self.counts[""] - self.counts["requests"] >= self.most_faults:
            return ""
        for kind, share in self.weather.faults.items():
            left -= share
            if left < 0:
                if kind in ("late", "twice") and not (writes and self.may_be_late(key)):
                    return ""
                if kind == "not deleted" and not (verb == "delete" and key.startswith(CHECKED)):
                    return ""
                return kind
        return ""

    def _note(self, text: str) -> None:
        self.trace.append(f"{self.steps:6} {self.seconds:12.3f}s {text}")

    # ------------------------------------------------------------------------------ storage

    def put(self, key: str, data: bytes, is_new: bool) -> None:
        """The effect of a write."""
        if is_new and key in self.objects:
            raise FileExistsError(key)
        self.on_write(key, data)
        self.objects[key] = data, self.seconds

    def drop(self, key: str) -> None:
        """The effect of a deletion."""
        if key not in self.objects:
            raise FileNotFoundError(key)
        self.on_delete(key)
        del self.objects[key]

    def begin_upload(self, number: int, key: str) -> None:
        """The effect of the beginning of an upload in parts."""
        self.unfinished[number] = key, self.seconds

    def complete_upload(self, number: int, data: bytes) -> None:
        """The effect of its end."""
        if number not in self.unfinished:
            raise FileNotFoundError(f"upload {number} was aborted")
        key, _ = self.unfinished.pop(number)
        self.put(key, data, False)

    def get(self, key: str) -> bytes:
        """The bytes of an object."""
        if key not in self.objects:
            raise FileNotFoundError(key)
        return self.objects[key][0]

    def listed(self, folder: str, after: str) -> tuple[dict[str, dict[str, Any]], bool]:
        """A page of the objects below a folder, with keys greater than `after`; whether it ends."""
        keys = sorted(key for key in self.objects if key.startswith(folder) and key > after)
        page = keys[: self.weather.pages]
        found = {f"{ROOT}/{key}": self._details(*self.objects[key]) for key in page}
        return found, len(page) == len(keys)

    def _details(self, data: bytes, seconds: float) -> dict[str, Any]:
        time = {"created": BEGIN.timestamp() + seconds} if self.weather.tells_times else {}
        return {"size": len(data), **time}

    def store(self, kind: type[CheckpointStore] = CheckpointStore) -> CheckpointStore:
        """A client."""
        made = kind(f"memory://{ROOT}")
        made.storage = SimulatedStorage(made.storage.spec, _Requests(self), ROOT)
        return made

    def recorder(self, process: str) -> Recorder:
        """Records into `lines`."""
        return _LineRecorder(self.lines, process)

    def events(self, key: str) -> list[Event]:
        """The operations on a key that were recorded."""
        return [each for each in events_of(self.lines) if each.key == key]

    # ------------------------------------------------------------------------ time and place

    def _process(self) -> _Process:
        """The process that runs; outside of processes, one that is never seen."""
        return self._processes.get(getcurrent(), _Process(-1))

    def _host(self) -> str:
        """Two machines, or containers, have one name."""
        return "cluster" if self._process().machine else "workstation"

    def _is_local(self, process: str) -> bool:
        return int(process) % 3 == self._process().machine

    def _is_alive(self, process: str) -> bool:
        """What a process can tell: those of other machines may be alive."""
        numbers = {each.number for each in self._processes.values() if not each.is_dead}
        return not process or not self._is_local(process) or int(process) in numbers

    @contextmanager
    def world(self) -> Iterator[None]:
        """Clock, ids, machines and threads of the product are the simulation's in the block."""

        class Clock(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
                return BEGIN + timedelta(seconds=self.seconds)

        ids = random.Random(f"ids {self.seed}")

        def uuid4() -> uuids.UUID:
            """A random one that begins with 0 or 1, so that short prefixes are ambiguous."""
            return uuids.UUID(int=ids.getrandbits(125), version=4)

        with ExitStack() as patches:
            for module in (json_objects, manifest, store, base):
                patches.enter_context(mock.patch.object(module, "datetime", Clock))
            tries = self.weather.tries
            fewer = (
                (commit, "_ANNOUNCE_TRIES", tries), (fencing, "_TAKE_OVER_TRIES", tries),
                (claims, "_LISTS", tries), (claims, "DELETION_WAIT_SECONDS", tries),
            )  # fmt: skip
            for target, name, value in (
                *(fewer if tries is not None else ()),
                (base, "MAX_OBJECT_BYTES", MOST_BYTES),
                (getpass, "getuser", lambda: "u"),
                (socket, "gethostname", self._host),
                (claims, "this_process", lambda: f"{self._process().number}"),
                (trial_owner, "this_process", lambda: f"{self._process().number}"),
                (claims, "is_alive", self._is_alive),
                (trial_owner, "is_local", self._is_local),
                (deletion_markers, "_seconds", lambda: self.seconds),
                (time, "sleep", self.sleep),
                (uuids, "uuid4", uuid4),
                (parallel, "ThreadPoolExecutor", _AtOnce),
            ):
                patches.enter_context(mock.patch.object(target, name, value))
            level = logging.root.manager.disable
            patches.callback(logging.disable, level)
            logging.disable(logging.CRITICAL)
            yield


_sleep = time.sleep


class _Requests:
    """The file system of a client, as fsspec's."""

    protocol = "simulated"

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = self._simulation = simulation

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        key = _key(path)
        data: bytes = self._simulation.request("get", key, lambda: self._simulation.get(key))
        return data[start:end]

    def pipe_file(self, path: str, data: bytes, mode: str = "overwrite") -> None:
        key, is_new = _key(path), mode == "create"
        effect = partial(self._simulation.put, key, bytes(data), is_new)
        self._simulation.request("create" if is_new else "put", key, effect, writes=True)

    def rm_file(self, path: str) -> None:
        key = _key(path)
        effect = partial(self._simulation.drop, key)
        self._simulation.request("delete", key, effect, writes=True)

    def find(self, path: str) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        folder, is_end = f"{_key(path)}/", False
        while not is_end:
            after = _key(max(found)) if found else ""
            effect = partial(self._simulation.listed, folder, after)
            page, is_end = self._simulation.request("list", f"{folder} after {after}", effect)
            found.update(page)
        return found

    def makedirs(self, path: str, exist_ok: bool) -> None:
        pass

    def invalidate_cache(self) -> None:
        pass


def _key(path: str) -> str:
    return path.removeprefix(f"{ROOT}/")


class SimulatedStorage(base.Storage):
    """The product's storage on a simulated file system."""

    def _find(self, path: str) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = self._fs.find(path)
        return found

    def _create_only_problem(self) -> str | None:
        return None

    def upload_in_parts(self, key: str, data: bytes) -> None:
        """Store a file as S3 does with large ones."""
        made, number = self._simulation, self._simulation.choose.getrandbits(64)
        with self._errors.translated(f"upload {key} to"):
            made.request("begin", key, partial(made.begin_upload, number, key))
            made.request("complete", key, partial(made.complete_upload, number, data))

    def unfinished_uploads(self, folder: str) -> list[tuple[str, base.StoredObject]]:
        """As `Storage.unfinished_uploads`."""
        return [(key, base.StoredObject(0, at)) for _, key, at in self._unfinished(folder)]

    def abort_uploads(self, folder: str, before: datetime | None = None) -> int:
        """As `Storage.abort_uploads`."""
        found = [
            (number, key)
            for number, key, at in self._unfinished(folder)
            if before is None or (at is not None and at < before)
        ]
        with self._errors.translated(f"abort unfinished uploads to {folder} in"):
            for number, key in found:
                effect = partial(self._simulation.unfinished.pop, number, None)
                self._simulation.request("abort", key, effect)
        return len(found)

    def _unfinished(self, folder: str) -> list[tuple[int, str, datetime | None]]:
        def listed() -> list[tuple[int, str, datetime | None]]:
            tells = self._simulation.weather.tells_times
            return [
                (number, key, BEGIN + timedelta(seconds=at) if tells else None)
                for number, (key, at) in self._simulation.unfinished.items()
                if key.startswith(f"{folder}/")
            ]

        with self._errors.translated(f"list {folder} in"):
            return self._simulation.request("uploads", folder, listed)

    @property
    def _simulation(self) -> Simulation:
        return self._fs.simulation


class _AtOnce:
    """A pool whose work is done when it is submitted: one order of what threads would do."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._has_failed = False

    def __enter__(self) -> _AtOnce:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        made: Future[Any] = Future()
        if not self._has_failed:
            try:
                made.set_result(work(*args))
            except Exception as error:  # noqa: BLE001 - as a pool does
                self._has_failed = True
                made.set_exception(error)
        return made


class _LineRecorder(Recorder):
    def __init__(self, lines: list[str], process: str) -> None:
        self._start(process)
        self._lines = lines

    def close(self) -> None:
        """Nothing is open."""

    def _write(self, **line: Any) -> None:
        # The lines' order is the time.
        self._lines.append(json.dumps({**line, "at": len(self._lines)}) + "\n")
