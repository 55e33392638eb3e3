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
from trial_core.processes.machine.accelerators import KIND_VARIABLE

START_SECONDS = 300.0


def on_gpus() -> list[tuple[str, int]]:
    """The UUID of each GPU and the id of each process that uses it."""
    asked = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader"]
    said = subprocess.run(asked, text=True, capture_output=True, check=True).stdout
    pairs = (line.split(", ") for line in said.splitlines())
    return [(uuid, int(pid)) for uuid, pid in pairs]


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

    def on_gpus(self) -> list[tuple[str, int]]:
        """As the function of this name, of its processes."""
        own = descendants(self._process.pid)
        return [each for each in on_gpus() if each[1] in own]

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
    while (left := pids & {pid for _, pid in on_gpus()}) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def nvcc_release() -> str:
    """CUDA's version, by the compiler that DeepSpeed calls: ``13.0``."""
    compiler = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc")
    said = subprocess.run([str(compiler), "--version"], text=True, capture_output=True, check=True)
    found = re.search(r"release (\d+\.\d+)", said.stdout)
    assert found, said.stdout
    return found[1]
