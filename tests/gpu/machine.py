"""This machine's NVIDIA GPUs, and runs on them."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.support.cli import TRIALFLOW, environment_in
from tests.support.prefect import isolated, prepared
from tests.support.processes import descendants, kill
from trial_core.slots.accelerators import KIND_VARIABLE

START_SECONDS = 300.0


def gpu_count() -> int:
    """How many GPUs there are."""
    return len(_answers("--query-gpu=uuid"))


def on_gpus() -> set[int]:
    """The ids of the processes that use a GPU."""
    return set(map(int, _answers("--query-compute-apps=pid")))


def _answers(query: str) -> list[str]:
    asked = ["nvidia-smi", query, "--format=csv,noheader"]
    return subprocess.run(asked, text=True, capture_output=True, check=True).stdout.split()


class Run:
    """A `trialflow train` in a process of its own."""

    def __init__(self, folder: Path, *arguments: str, **variables: str) -> None:
        self.output = folder / "output"
        with self.output.open("a") as output:
            self._process = subprocess.Popen(
                [*TRIALFLOW, "train", *arguments],
                cwd=folder, env=as_a_user(folder, variables), text=True,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def on_gpus(self) -> set[int]:
        """Those of its processes that use a GPU."""
        return on_gpus() & set(descendants(self._process.pid))

    def kill(self) -> None:
        """SIGKILL the driver; its ranks find that out."""
        self._process.kill()
        self._process.wait()

    def kill_all(self) -> None:
        """SIGKILL the driver and all that it has started, the driver first."""
        started = descendants(self._process.pid)
        self.kill()
        kill(started)

    def ends(self) -> str:
        """Wait for its end, which must be a good one. Its output."""
        code = self._process.wait(timeout=START_SECONDS)
        assert code == 0, self.said()
        return self.said()

    def said(self) -> str:
        """Its output, and the logs of its ranks."""
        logs = sorted(self.output.parent.glob("home/**/rank-*.log"))
        return "\n".join(path.read_text(errors="replace") for path in [self.output, *logs])


@contextmanager
def started(folder: Path, *arguments: str, **variables: str) -> Iterator[Run]:
    """Start a run; whatever is left of it at the end is killed."""
    run = Run(folder, *arguments, **variables)
    try:
        yield run
    finally:
        run.kill_all()


def as_a_user(folder: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of a command whose user has chosen no accelerator."""
    environment = environment_in(folder, {"PREFECT_API_URL": ""})
    environment |= isolated(prepared(folder / "prefect"))
    environment.pop(KIND_VARIABLE, None)
    return {**environment, **variables}


def wait_until_off(pids: set[int], timeout_seconds: float) -> set[int]:
    """Wait until none of these processes uses a GPU; those that still do."""
    deadline = time.monotonic() + timeout_seconds
    while (left := pids & on_gpus()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def nvcc_release() -> str:
    """CUDA's version, by the compiler that DeepSpeed calls: ``13.0``."""
    compiler = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc")
    said = subprocess.run([str(compiler), "--version"], text=True, capture_output=True, check=True)
    found = re.search(r"release (\d+\.\d+)", said.stdout)
    assert found, said.stdout
    return found[1]
