"""A tracker of a user's own package: it writes lines to a file, and can be told to fail."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from trial_core.observe.trackers.records import AnyRecord
from trial_core.observe.trackers.tracker import RecordRefused, Tracker

CHILD = "3333.5"


class LinesTracker(Tracker):
    """Options: ``file``; ``hang``, ``down``: files while which exist it hangs, or fails; ``child``:
    how long a child process sleeps, with ``hang``; ``refuses``: a text that a record may not have.
    """

    def open(self, known: str) -> str:
        if "hang" in self.options:  # as the programs of some trackers do
            subprocess.Popen(["sleep", self.options.get("child", CHILD)])
        return known or f"run-of-{self.run.trial}"

    def send(self, records: Sequence[AnyRecord]) -> None:
        while Path(self.options.get("hang", "")).is_file():
            time.sleep(0.05)
        if Path(self.options.get("down", "")).is_file():
            raise ConnectionError("nobody answers")
        lines = [msgspec.json.encode(each).decode() for each in records]
        if (text := self.options.get("refuses")) and any(text in line for line in lines):
            raise RecordRefused(f"no {text} here")
        with Path(self.options["file"]).open("a") as file:
            file.writelines(f"{line}\n" for line in lines)

    @staticmethod
    def points(file: Path, name: str) -> list[tuple[int, float]]:
        """The points of a metric."""
        records = [json.loads(line) for line in file.read_text().splitlines()]
        return [
            (each["batches"], each["values"][name])
            for each in records
            if each["type"] == "Metrics" and name in each["values"]
        ]
