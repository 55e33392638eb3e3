"""Fits in forked processes, which a test kills at a moment of its choice and resumes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.processes import alive, descendants, wait_until_gone

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "tests" / "support" / "scripts" / "fit_forked.py"
START_SECONDS = 120.0
GONE_SECONDS = 10.0


@dataclass
class Fit:
    """The settings of a fit, and what it has left.

    Attributes:
        folder: for its logs and records.
        storage: as ``checkpoint_storage`` of an experiment.
        lengths: arguments of `Trainer.fit`, in batches.
    """

    folder: Path
    storage: dict[str, Any]
    hparams: dict[str, Any]
    lengths: dict[str, int]
    ranks: int = 2

    def batches(self, rank: int) -> list[list[Any]]:
        """What a rank has recorded of every batch, over all attempts."""
        path = self.folder / f"batches-{rank}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]

    def logs(self) -> str:
        """The ends of the ranks' logs."""
        paths = sorted(self.folder.glob("rank-*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in paths)


class ForkedFits:
    """A process that forks ranks, which need not import anything."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, fit: Fit) -> None:
        """Resume the fit and run it to its end."""
        self._start(fit)
        codes = self._read()["codes"]
        assert codes == [0] * fit.ranks, f"{codes}\n{fit.logs()}"

    def kill(self, fit: Fit, batch: int, delay_seconds: float, victims: Sequence[int]) -> None:
        """Fit, and SIGKILL the ranks `victims` a delay after rank 0 has trained `batch`.

        The process that forks ends the other ranks, as a launcher does. No process is left.
        """
        seen = len(fit.batches(0))
        pids = self._start(fit)
        self._wait_for(fit, seen, batch)
        time.sleep(delay_seconds)
        started = [child for pid in pids for child in descendants(pid)]
        for victim in victims:
            with suppress(ProcessLookupError):
                os.kill(pids[victim], signal.SIGKILL)
        codes = self._read()["codes"]
        # Another rank may raise, as its peer is gone, before the process that forks ends it.
        assert {codes[victim] for victim in victims} <= {0, -signal.SIGKILL}, fit.logs()
        left = wait_until_gone(started, GONE_SECONDS)
        assert left == [], f"processes outlived their rank: {left}"

    def _start(self, fit: Fit) -> list[int]:
        fit.folder.mkdir(exist_ok=True)
        run = {
            "folder": str(fit.folder), "ranks": fit.ranks, "hparams": fit.hparams,
            "storage": fit.storage, "fit": fit.lengths,
        }  # fmt: skip
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(run) + "\n")
        self._process.stdin.flush()
        pids: list[int] = self._read()["pids"]
        return pids

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the process that forks ranks ended with {self._process.wait()}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _wait_for(self, fit: Fit, seen: int, batch: int) -> None:
        """Wait until rank 0 has recorded `batch` or a later one, after its first `seen` records."""
        deadline = time.monotonic() + START_SECONDS
        while all(line[0] < batch for line in fit.batches(0)[seen:]):
            assert time.monotonic() < deadline, f"batch {batch} was not trained:\n{fit.logs()}"
            time.sleep(0.002)


@contextmanager
def forked_fits() -> Iterator[ForkedFits]:
    """Start the process that forks ranks: it imports torch and DeepSpeed first."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(SCRIPT)],
        cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={
            **os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1",
        },
    )  # fmt: skip
    try:
        yield ForkedFits(process)
    finally:
        started = descendants(process.pid)
        process.communicate()
        for pid in alive(started):
            os.kill(pid, signal.SIGKILL)
