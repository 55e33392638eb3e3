"""Starts and stops each contestant, and continues it as a person would."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import psutil

from benchmarks.goodput.workload import Job
from benchmarks.ranks import ENVIRONMENT, ROOT
from tests.support.s3 import S3Server


class Contestant(Protocol):
    """A run of a contestant, which the harness starts and disturbs."""

    def start(self, ranks: int) -> None:
        """Start the run, or continue it from its last checkpoint as its documentation says."""

    def stop(self) -> None:
        """Ask the run to end, as a person does who will continue it."""

    def driver(self, rank: psutil.Process) -> psutil.Process | None:
        """Return the launcher or driver above a rank, or None if it is gone."""

    def has_ended(self) -> bool:
        """Return whether the run has ended or given up, so that nothing will continue it."""


class Command:
    """A contestant that a command starts in the foreground of a terminal.

    Args:
        command: its arguments; ``{ranks}`` becomes the number of ranks.
        variables: for its environment.
        log: the file for its output.
    """

    def __init__(self, command: list[str], variables: dict[str, str], log: Path) -> None:
        self._command, self._log = command, log
        self._environment = {**os.environ, **variables}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, ranks: int) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [each.format(ranks=ranks) for each in self._command],
                cwd=ROOT, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def driver(self, rank: psutil.Process) -> psutil.Process | None:
        if self.has_ended() or self._process is None:
            return None
        return psutil.Process(self._process.pid)

    def has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None


TORCHRUN = [
    sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node={ranks}",
]  # fmt: skip
# Each contestant with the modules that it needs besides trialflow's own.
COMMANDS = {
    "torchrun": (("boto3",), "with_deepspeed"),
    "lightning": (("lightning", "torchdata"), "with_lightning"),
    "ray": (("ray", "pandas"), "with_ray"),
    "accelerate": (("accelerate", "boto3"), "with_accelerate"),
}
NAMES = ["trialflow", *COMMANDS]


def missing_modules(name: str) -> list[str]:
    """Return the modules that have to be installed for that contestant."""
    needed = COMMANDS[name][0] if name in COMMANDS else ()
    return [each for each in needed if importlib.util.find_spec(each) is None]


@contextmanager
def contestant(name: str, folder: Path, server: S3Server) -> Iterator[Callable[[Job], Contestant]]:
    """Start the services of one of `NAMES`. Yields a function that makes a run, not started yet.

    Args:
        folder: for the logs of these services.
    """
    if name == "trialflow":
        from benchmarks.goodput.with_trialflow import Trialflow, service

        with service(folder) as api:
            yield lambda job: Trialflow(api, job, server)
        return
    module = f"benchmarks.goodput.{COMMANDS[name][1]}"

    def new_run(job: Job) -> Command:
        command = [sys.executable, "-m", module, "{ranks}"]
        if name != "ray":
            command = [*TORCHRUN, f"--max-restarts={job.restarts}", "-m", module]
        return Command(command, environment(job, server), Path(job.folder, f"{name}.log"))

    yield new_run


def environment(job: Job, server: S3Server) -> dict[str, str]:
    """Return the environment variables of every contestant."""
    return {
        **ENVIRONMENT,
        **job.environment,
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "RAY_TRAIN_V2_ENABLED": "1",
        "RAY_AUTH_MODE": "disabled",  # else it writes a token to the home folder
        # Else torchrun's new ranks may read the addresses of the old ones, and fail (torch 2.13).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "AWS_ENDPOINT_URL": server.endpoint_url,
        "AWS_ACCESS_KEY_ID": server.access_key,
        "AWS_SECRET_ACCESS_KEY": server.secret_key,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        # The gateway does not know the checksums in trailers that newer clients send by default.
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
    }
