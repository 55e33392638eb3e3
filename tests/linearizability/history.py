"""Histories: what each process called and what it got back, with the times of one machine's clock.

A process appends a line when it calls an operation, and another one when the operation returns. So
a process that is killed leaves the call without a return.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.linearizability.checker import NEVER, Operation, check
from trial_core.errors import CheckpointError, RegistryError, StorageError

ANOTHER_STORAGE = "is not the storage with which"


class Event(NamedTuple):
    """An operation of a process.

    Attributes:
        id: unique in all histories.
        key: what it acted on: a trial, a checkpoint, a model.
        outcome: what it returned, or the name of the error that it raised; None: not known.
    """

    id: str
    key: str
    name: str
    arguments: dict[str, Any]
    outcome: Any
    called: float
    returned: float

    @property
    def is_known(self) -> bool:
        """Whether the operation has returned, with success or with an error that says no."""
        return self.returned != NEVER

    def __str__(self) -> str:
        given = ", ".join(f"{name}={value}" for name, value in self.arguments.items())
        outcome = self.outcome if self.is_known else "not known"
        return f"{self.id} {self.name}({self.key}{', ' if given else ''}{given}) -> {outcome}"


class Recorder:
    """Writes the history of one process."""

    def __init__(self, path: Path, process: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._start(process)

    def _start(self, process: str) -> None:
        self._process = process
        self._numbers = itertools.count()

    def call(self, name: str, key: str, act: Callable[[], Any], **arguments: Any) -> Any:
        """Carry out an operation and record it; its outcome, see `Event`."""
        return self.call_all(name, [key], lambda: {key: act()}, **arguments).get(key)

    def call_all(
        self, name: str, keys: Iterable[str], act: Callable[[], dict[str, Any]], **arguments: Any
    ) -> dict[str, Any]:
        """As `call`, for one call that acts on several keys: each has its own outcome."""
        ids = {key: f"{self._process}.{next(self._numbers)}" for key in keys}
        for key, each in ids.items():
            self._write(id=each, key=key, name=name, arguments=arguments)
        try:
            outcomes = act()
        except StorageError as error:
            if ANOTHER_STORAGE not in str(error):
                return {}  # it may have been carried out
            outcomes = dict.fromkeys(ids, "another storage")
        except (CheckpointError, RegistryError) as error:
            outcomes = dict.fromkeys(ids, type(error).__name__)
        for key, each in ids.items():
            self._write(id=each, outcome=outcomes[key])
        return outcomes

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _write(self, **line: Any) -> None:
        # The clock of all processes of this machine: CLOCK_MONOTONIC.
        os.write(self._file, json.dumps({**line, "at": time.monotonic()}).encode() + b"\n")


def read_events(paths: Iterable[Path]) -> Iterator[Event]:
    """All operations that the processes have recorded."""
    for path in paths:
        yield from events_of(path.read_text().splitlines(keepends=True))


def events_of(lines: Iterable[str]) -> Iterator[Event]:
    """The operations that one process has recorded, or several in the order of their times."""
    calls: dict[str, Event] = {}
    for text in lines:
        if not text.endswith("\n"):
            continue  # the process was killed
        line = json.loads(text)
        if "name" in line:
            calls[line["id"]] = Event(
                line["id"], line["key"], line["name"], line["arguments"], None, line["at"], NEVER
            )
        else:
            call = calls[line["id"]]
            calls[line["id"]] = call._replace(outcome=line["outcome"], returned=line["at"])
    yield from calls.values()


def check_by(model: Any, key: str, events: Iterable[Event]) -> None:
    """Check the history of a key by a model, which has `initial` and `parts`. Raises as `check`."""
    operations = [
        Operation(f"{event} {name}", steps, event.called, event.returned)
        for event in events
        for name, steps in model.parts(event)
    ]
    check(model.initial(key), operations)
