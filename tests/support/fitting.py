"""Starts a user's script with a launcher, and reads its results."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from tests.support.processes import descendants, kill, wait_until_gone
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("scripts") / "fit_toy.py"
LIMIT_SECONDS = 240

Launcher = Literal["python", "torchrun", "deepspeed"]


def fit_toys(
    launcher: Launcher, folder: Path, *runs: dict[str, Any], ranks: int = 2
) -> list[list[dict[str, Any]]]:
    """Fit a toy trial for each of `runs`, all in one start of the ranks.

    Files that the runs write by default are below `folder`.

    Returns:
        For each run, its result on each rank.
    """
    folder.mkdir(parents=True, exist_ok=True)
    spec = folder / "spec.json"
    spec.write_text(json.dumps(runs))
    output = start(launcher, folder, ranks, str(SCRIPT), str(spec))
    outcomes = [
        [folder / f"{index}-rank-{rank}.json" for rank in range(ranks)]
        for index in range(len(runs))
    ]
    missing = [path.name for run in outcomes for path in run if not path.exists()]
    assert not missing, f"no {missing}; output:\n{output}"
    return [[json.loads(path.read_text()) for path in run] for run in outcomes]


def start(launcher: Launcher, folder: Path, ranks: int, *command: str) -> str:
    """Run a script with a launcher in `folder`; its output."""
    process = subprocess.Popen(
        [*_prefix(launcher, ranks), *command],
        cwd=folder,
        env=_environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        return process.communicate(timeout=LIMIT_SECONDS)[0]
    finally:
        if process.poll() is None:
            ranks = descendants(process.pid)  # torchrun starts each in a separate session
            os.killpg(process.pid, signal.SIGKILL)
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)
            process.wait()


WATCHED = SCRIPT.with_name("fit_watched.py")
GONE_SECONDS = 20.0


@dataclass
class WatchedRanks:
    """Ranks of ``fit_watched.py`` or ``core_watched.py``.

    Each is started as by srun: nothing ends them together.

    Attributes:
        folder: of their files.
        processes: by rank; with a launcher, that alone.
    """

    folder: Path
    processes: list[subprocess.Popen[bytes]]

    def until_batch(self, batch: int, rank: int = 0) -> None:
        """Wait until a rank has trained this batch."""
        path = self.folder / f"batches-{rank}"
        until(
            lambda: path.exists() and len(path.read_text().splitlines()) > batch,
            f"batch {batch} of rank {rank}", instead=self.logs,
        )  # fmt: skip

    def pids(self) -> list[int]:
        """All processes that run for them."""
        own = [process.pid for process in self.processes]
        return own + [child for pid in own for child in descendants(pid)]

    def driver(self) -> int:
        """The driver's process."""
        (found,) = [pid for pid in self.pids() if _is_driver(pid)]
        return found

    def left(self, pids: Sequence[int]) -> list[str]:
        """What still runs of these processes after `GONE_SECONDS`."""
        for process in self.processes:  # or it stays a zombie
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GONE_SECONDS)
        return [" ".join(psutil.Process(pid).cmdline()) for pid in wait_until_gone(pids, 5.0)]

    def ended(self, rank: int) -> dict[str, Any]:
        """How the fit of a rank has ended, once its process has."""
        process = self.processes[min(rank, len(self.processes) - 1)]
        try:
            process.wait(LIMIT_SECONDS)
            ended: dict[str, Any] = json.loads((self.folder / f"ended-{rank}.json").read_text())
        except (subprocess.TimeoutExpired, FileNotFoundError) as error:
            raise AssertionError(f"rank {rank} has not ended; logs:\n{self.logs()}") from error
        return ended

    def logs(self) -> str:
        """What they have printed."""
        paths = sorted(self.folder.glob("rank-*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text()[-4000:]}" for path in paths)

    def report(self) -> str:
        """The run's report."""
        (path,) = self.folder.glob("home/*/report.md")
        return path.read_text()


@contextmanager
def watched_ranks(
    folder: Path,
    launcher: Launcher | None = None,
    ranks: int = 2,
    prefixes: Sequence[Sequence[str]] = (),
    environments: Sequence[dict[str, str]] = (),
    script: Path = WATCHED,
    **options: Any,
) -> Iterator[WatchedRanks]:
    """Start ``fit_watched.py``, or another script like it; its processes are gone after the block.

    Args:
        launcher: starts all ranks; None: each is a process of its own.
        prefixes: what comes before each rank's command.
        environments: more environment variables of each rank.
        options: of the script.
    """
    given = json.dumps({"folder": str(folder), "batches": 10**6, **options})
    starts = [[*_prefix(launcher, ranks)]] if launcher else [[sys.executable]] * ranks
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    processes = []
    for rank, start_of_rank in enumerate(starts):
        own = {} if launcher else {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }  # fmt: skip
        if environments:
            own |= environments[rank]
        prefix = prefixes[rank] if prefixes else []
        with (folder / f"rank-{rank}.log").open("ab") as log:
            processes.append(
                subprocess.Popen(
                    [*prefix, *start_of_rank, str(script), given],
                    cwd=folder, env={**_environment(folder), **own}, stdin=subprocess.DEVNULL,
                    stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                )
            )  # fmt: skip
    started = WatchedRanks(folder, processes)
    try:
        yield started
    finally:
        kill(started.pids())
        for process in processes:
            process.wait()


def _is_driver(pid: int) -> bool:
    try:
        command = " ".join(psutil.Process(pid).cmdline())
    except psutil.NoSuchProcess:
        return False
    return "trialflow: driver" in command or "trial_core.driver.script_driver_main" in command


def _prefix(launcher: Launcher, ranks: int) -> list[str]:
    if launcher == "python":
        return [sys.executable]
    if launcher == "torchrun":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*torchrun, f"--nproc-per-node={ranks}"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    deepspeed = Path(sys.executable).with_name("deepspeed")
    return [sys.executable, str(deepspeed), f"--num_gpus={ranks}", f"--master_port={port}"]


def _environment(folder: Path) -> dict[str, str]:
    launched = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    inherited = {name: value for name, value in os.environ.items() if name not in launched}
    return {
        **inherited,
        "PYTHONPATH": str(ROOT),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "TRIALFLOW_HOME": str(folder / "home"),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
    }
