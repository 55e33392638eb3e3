"""Saves in forked processes that a test kills (see ``tests/support/scripts/save_forked.py``)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.faults.saving import Site

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "tests" / "support" / "scripts" / "save_forked.py"
PID_SECONDS = 20.0


class ForkedSaves:
    """A process that forks processes that save, one at a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._pid: Future[int] = Future()

    def run(
        self, site: Site, staged: Mapping[int, Path], uuid: str, part_bytes: int,
        rank: int | None = None,
    ) -> int:  # fmt: skip
        """Save, or upload as `rank` does; the exit code: 0, 3 (StorageError), -9 (killed)."""
        self._pid = Future()
        job = {
            "url": site.url, "options": site.options,
            "staged": {str(rank): str(folder) for rank, folder in staged.items()},
            "uuid": uuid, "part_bytes": part_bytes, "rank": rank,
        }  # fmt: skip
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        self._pid.set_result(self._read()["pid"])
        code: int = self._read()["code"]
        return code

    def kill(self) -> None:
        """SIGKILL the process that saves. From any thread, also before the pid is known."""
        os.kill(self._pid.result(PID_SECONDS), signal.SIGKILL)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the process that forks saves ended with {self._process.wait()}"
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def forked_saves() -> Iterator[ForkedSaves]:
    """Start the process that forks."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(SCRIPT)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield ForkedSaves(process)
    finally:
        process.communicate()
