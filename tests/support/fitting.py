"""Starts a user's script with a launcher, and reads its results."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

from tests.support.processes import descendants

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
