"""`trialflow doctor`: checks that this machine can train."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from trial_core import text_format
from trial_core.errors import ConfigError, TrialflowError
from trialflow.deployments.cli import console
from trialflow.deployments.cli.experiment_options import ConfigFile, Storage, open_store

if TYPE_CHECKING:
    from trial_core.checkpoint.store import CheckpointStore
    from trial_core.slots.accelerators import Accelerators

NEEDED = ("trialflow", "torch", "deepspeed", "prefect", "fsspec")
OLDEST_PYTHON = (3, 10)
FOR_OPERATORS = "for optimizers that DeepSpeed compiles: all but those of torch (torch_adam: true)"
ACCELERATOR_CHECK = (sys.executable, "-m", "trial_core.deepspeed.accelerator_check")

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        status: ``fail``: training is impossible; ``warn``: a part of it is limited.
        found: what the check saw.
        advice: what to do; empty if nothing.
    """

    subject: str
    status: Status
    found: str
    advice: str = ""

    def __str__(self) -> str:
        advice = f": {self.advice}" if self.advice else ""
        return f"{self.status:<4}  {self.subject:<12} {self.found}{advice}"


def doctor(
    *,
    config: ConfigFile = None,
    storage: Storage = None,
    json_: Annotated[
        bool, Parameter(name="--json", negative=(), help="Print JSON, for programs.")
    ] = False,
) -> int:
    """Check packages, compiler, accelerators, storage and Prefect server.

    The exit code is 1 if a check fails, so that training is impossible, else 0.
    """
    checks = []
    for check in examine(config, storage):
        checks.append(check)
        if not json_:
            print(text_format.clean(str(check)), flush=True)
    if json_:
        print(json.dumps([asdict(check) for check in checks], indent=2))
    return console.FAILED if any(check.status == "fail" for check in checks) else 0


def examine(config: Path | None, storage: str | None) -> Iterator[Check]:
    """Run all checks, one after the other."""
    yield python()
    for package in NEEDED:
        yield installed(package)
    yield installed("s3fs", or_else="warn", advice="pip install s3fs, for s3:// storage")
    yield compiler()
    yield ninja()
    yield from accelerators()
    yield from stored(config, storage)
    yield prefect_server()


def python() -> Check:
    """Check Python's version."""
    if sys.version_info < OLDEST_PYTHON:
        needed = ".".join(map(str, OLDEST_PYTHON))
        return Check("python", "fail", platform.python_version(), f"use Python {needed} or newer")
    return Check("python", "ok", f"{platform.python_version()} ({sys.executable})")


def installed(package: str, or_else: Status = "fail", advice: str = "") -> Check:
    """Check that a package is installed, and report its version."""
    try:
        return Check(package, "ok", importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return Check(package, or_else, "not installed", advice or f"pip install {package}")


def compiler() -> Check:
    """Check that there is a C++ compiler."""
    name = os.environ.get("CXX") or "g++"
    path = shutil.which(name)
    if path is None:
        advice = f"install it (apt install g++) {FOR_OPERATORS}"
        return Check("compiler", "warn", f"{name} not found", advice)
    return Check("compiler", "ok", path)


def ninja() -> Check:
    """Check that there is ninja where ranks search: first in the environment, then on PATH."""
    own_first = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    path = shutil.which("ninja", path=os.pathsep.join(own_first))
    if path is not None:
        return Check("ninja", "ok", path)
    return Check("ninja", "warn", "not found", f"pip install ninja {FOR_OPERATORS}")


def accelerators() -> Iterator[Check]:
    """Report what slots would train on, and check it in a process like a rank's."""
    from trial_core.slots.accelerators import NVIDIA, torch_problem, visible_accelerators

    try:
        visible = visible_accelerators(os.environ)
    except TrialflowError as error:
        yield Check("accelerators", "fail", str(error))
        return
    if not visible.devices:
        yield Check("accelerators", "ok", "none: slots are CPU processes")
        return
    found = f"{text_format.plural(len(visible.devices), 'accelerator')} ({visible.kind})"
    problem = torch_problem()
    if problem is not None:
        yield Check("accelerators", "fail", found, problem)
        return
    problem, nvcc = _problems_of_ranks(visible)
    yield Check("accelerators", "fail" if problem else "ok", found, problem or "")
    if nvcc is not None:
        yield Check("nvcc", "warn", nvcc, f"needed {FOR_OPERATORS}")
    elif visible.kind == NVIDIA and problem is None:
        yield Check("nvcc", "ok", "of the same CUDA as torch")


def _problems_of_ranks(visible: Accelerators) -> tuple[str | None, str | None]:
    """Why ranks cannot use the accelerators, and why they cannot compile operators for them."""
    from trial_core.slots.accelerators import KIND_VARIABLE, PROBE_TIMEOUT_SECONDS

    try:
        done = subprocess.run(
            [*ACCELERATOR_CHECK, str(len(visible.devices))],
            env={**os.environ, KIND_VARIABLE: visible.kind},
            capture_output=True, text=True, timeout=PROBE_TIMEOUT_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        return str(error), None
    lines = done.stdout.splitlines()
    if done.returncode != 0 or len(lines) < 2:
        last = done.stderr.strip().splitlines()[-1:] or ["without a message"]
        return f"a process like a rank's ended with code {done.returncode}: {last[0]}", None
    # Libraries may print before.
    return json.loads(lines[-2]), json.loads(lines[-1])


def stored(config: Path | None, storage: str | None) -> Iterator[Check]:
    """Check that the storage is writable, and how it prevents conflicting writes."""
    try:
        store = open_store(config, storage)
        store.check_writable()
        yield Check("storage", "ok", f"{store.url} is writable")
        yield create_only_writes(store)
    except TrialflowError as error:
        yield Check("storage", "fail", str(error))


def create_only_writes(store: CheckpointStore) -> Check:
    """Report how runs and the registry prevent conflicting writes on this storage."""
    from trial_core.checkpoint.create_only import CLOCKS_ADVICE

    if store.storage.has_conditional_writes():
        return Check("create-only", "ok", "conditional writes")
    return Check(
        "create-only",
        "warn",
        "the storage has no conditional writes, so runs and the registry take a lock",
        CLOCKS_ADVICE,
    )


def prefect_server() -> Check:
    """Check that the server that runs would use, if it runs already, answers."""
    from trialflow.flows.server.embedded_server import configured_api_problem, using_server_of_up
    from trialflow.flows.server.prefect_settings import prepare_prefect

    prepare_prefect()
    from prefect.settings import get_current_settings

    try:
        with using_server_of_up() as login:
            api_url = get_current_settings().api.url
            if not api_url:
                return Check("server", "ok", "none configured: each run starts its own")
            if problem := configured_api_problem():
                return Check("server", "fail", problem)
            return Check("server", "ok", f"{api_url}, of `trialflow up`" if login else api_url)
    except ConfigError as error:
        return Check("server", "fail", str(error))
