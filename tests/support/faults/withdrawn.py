"""A run from which something of its machine is withdrawn after its first checkpoint.

``python -m tests.support.faults.withdrawn FAULT FOLDER``, as `withdrawn` starts it, is the run's
driver in mount and user namespaces of its own, without the right to pass over permissions. Its
standard error is the log of the run. Its last line of output is an `Outcome`, as JSON.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from tests.support.driving import TRIAL, drive
from tests.support.slots import toy_config
from trial_core.checkpoint.storage import storage_errors
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import TrialflowError
from trial_core.observe.events.observers import Observer

NAMESPACES = (
    "unshare", "--map-root-user", "--mount",
    "setpriv", "--bounding-set=-dac_override,-dac_read_search",
)  # fmt: skip
FIRST, BATCHES = 4, 12
"""Batches of the first checkpoint, after which something is withdrawn, and of the whole run."""


@dataclass
class Outcome:
    """What came of a run, and of its continuation once all is as before.

    Attributes:
        committed: batches of the checkpoints that the run committed.
        error: what it raised: its type and text; empty if it ended well.
        restarts: the reasons of its restarts.
        without: files in the place of the storage while it was not mounted.
        checkpoints: batches of all checkpoints in the end.
    """

    committed: list[int] = field(default_factory=list)
    error: str = ""
    restarts: list[str] = field(default_factory=list)
    without: list[str] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)


def withdrawn(fault: str, folder: Path) -> tuple[Outcome, str]:
    """Train, withdraw something, give it back, continue. The outcome, and the log."""
    done = subprocess.run(
        [*NAMESPACES, sys.executable, "-m", __name__, fault, str(folder)],
        capture_output=True, text=True, check=False,
        env={**os.environ, "TRIALFLOW_HOME": str(folder / "home")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return Outcome(**json.loads(done.stdout.splitlines()[-1])), done.stderr


class Machine:
    """The machine of a run, whose storage is `checkpoints` in `folder`.

    Before the run, `prepare` mounts what `withdraw` takes; `give_back` undoes that.
    """

    def __init__(self, folder: Path) -> None:
        self.storage, self._beside = folder / "checkpoints", folder / "beside"
        self._ranks: list[int] = []
        for each in (self.storage, self._beside):
            each.mkdir()

    def prepare(self, fault: str) -> None:
        """Mount the storage, for the faults of mounts."""
        if fault in ("full", "read-only"):
            _run("mount", "-t", "tmpfs", "-o", "size=4m", "none", self.storage)
        if fault == "unmounted":
            _run("mount", "--bind", self._beside, self.storage)

    def withdraw(self, fault: str) -> None:
        """Take away what `fault` names."""
        if fault == "full":
            _fill(self.storage / "of another program")
        elif fault == "read-only":
            _run("mount", "-o", "remount,ro", self.storage)
        elif fault == "unmounted":
            _run("umount", "--lazy", self.storage)
        elif fault == "permissions":
            _run("chmod", "--recursive", "a-w", self.storage)
        elif fault == "shared memory":
            _run("mount", "-t", "tmpfs", "-o", "size=64k", "none", "/dev/shm")
        elif fault == "descriptors of ranks":
            self._ranks = [
                child.pid
                for child in psutil.Process().children(recursive=True)
                if "trialflow: rank" in " ".join(child.cmdline())
            ]
            _limit_descriptors(8, *self._ranks)
        elif fault == "descriptors of the driver":
            _limit_descriptors(8, os.getpid())
        else:
            raise AssertionError(fault)

    def give_back(self, fault: str) -> None:
        """Undo `withdraw`."""
        if fault == "full":
            (self.storage / "of another program").unlink()
        elif fault == "read-only":
            _run("mount", "-o", "remount,rw", self.storage)
        elif fault == "unmounted":
            _run("mount", "--bind", self._beside, self.storage)
        elif fault == "permissions":
            _run("chmod", "--recursive", "u+w", self.storage)
        elif fault == "shared memory":
            _run("umount", "/dev/shm")
        elif fault == "descriptors of the driver":
            _limit_descriptors(4096, os.getpid())


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True)


def _fill(path: Path) -> None:
    """Write until nothing more fits."""
    file = os.open(path, os.O_CREAT | os.O_WRONLY)
    try:
        while os.write(file, bytes(4096)):
            pass
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
    finally:
        os.close(file)


def _limit_descriptors(limit: int, *pids: int) -> None:
    for pid in pids:
        _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, most))


def run_twice(
    withdraw: Callable[[], None], give_back: Callable[[], None], config: object
) -> Outcome:
    """Train with `withdraw` after the first checkpoint; give back, and continue the trial."""
    outcome = Outcome()

    class Watching(Observer):
        def checkpoint_committed(
            self, uuid: str, batches: int, total_bytes: int, digest: str = ""
        ) -> None:
            outcome.committed.append(batches)
            if len(outcome.committed) == 1:
                withdraw()

        def restarting(self, reason: str, attempt: int, max_restarts: int) -> None:
            outcome.restarts.append(reason)

    try:
        drive(config, observer=Watching())
    except TrialflowError as error:
        outcome.error = f"{type(error).__name__}: {error}"
    give_back()
    if outcome.error:
        drive(config)
    place = config.checkpoint_storage
    stored = CheckpointStore(place.url, place.options).list(TRIAL)
    outcome.checkpoints = sorted(each.progress.batches_trained for each in stored)
    return outcome


def main(fault: str, folder: Path) -> None:
    """The run and its continuation, in the namespaces."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    storage_errors.PAUSE_SECONDS = 0.1
    machine = Machine(folder)
    machine.prepare(fault)
    trial = "loader_trials:LargeSamples" if fault == "shared memory" else "toy_trial:ToyTrial"
    config = toy_config(
        folder, BATCHES, entrypoint=trial, scheduling_unit=FIRST, max_restarts=1,
        min_checkpoint_period={"batches": FIRST},
    )  # fmt: skip
    without: list[str] = []

    def give_back() -> None:
        if fault == "unmounted":
            without[:] = [str(each) for each in machine.storage.rglob("*") if each.is_file()]
        machine.give_back(fault)

    outcome = run_twice(lambda: machine.withdraw(fault), give_back, config)
    outcome.without = without
    print(json.dumps(asdict(outcome)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
