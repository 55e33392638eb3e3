"""`trialflow doctor`: whether this machine has what training needs."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from trial_core import text_format
from trial_core.errors import TrialflowError
from trialflow.deployments.cli import console
from trialflow.deployments.cli.experiment_options import ConfigFile, Storage, open_store

if TYPE_CHECKING:
    from trial_core.checkpoint.store import CheckpointStore

NEEDED = ("trialflow", "torch", "deepspeed", "prefect", "fsspec")
OLDEST_PYTHON = (3, 10)

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """What was looked at, and what was found.

    Attributes:
        subject: what was looked at.
        status: ``fail``: training cannot work so; ``warn``: some of it cannot.
        found: what was seen.
        advice: what to do about it.
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
    """Say what is installed, on what it can train, and whether it reaches storage and server.

    The exit code is 0 when nothing is in the way of training, else 1.
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
    """Everything there is to check, one after the other."""
    yield python()
    for package in NEEDED:
        yield installed(package)
    yield installed("s3fs", or_else="warn", advice="pip install s3fs, for s3:// storage")
    yield compiler()
    yield ninja()
    yield accelerators()
    yield from stored(config, storage)
    yield prefect_server()


def python() -> Check:
    """Whether Python is new enough."""
    if sys.version_info < OLDEST_PYTHON:
        needed = ".".join(map(str, OLDEST_PYTHON))
        return Check("python", "fail", platform.python_version(), f"use Python {needed} or newer")
    return Check("python", "ok", f"{platform.python_version()} ({sys.executable})")


def installed(package: str, or_else: Status = "fail", advice: str = "") -> Check:
    """Whether a package is installed, and which version of it."""
    try:
        return Check(package, "ok", importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return Check(package, or_else, "not installed", advice or f"pip install {package}")


def compiler() -> Check:
    """Whether there is a C++ compiler."""
    name = os.environ.get("CXX") or "g++"
    path = shutil.which(name)
    if path is None:
        advice = "install it (apt install g++); DeepSpeed compiles operators on its first run"
        return Check("compiler", "fail", f"{name} not found", advice)
    return Check("compiler", "ok", path)


def ninja() -> Check:
    """Whether there is ninja, where the ranks look for it."""
    path = shutil.which("ninja")
    if path is not None:
        return Check("ninja", "ok", path)
    beside = Path(sys.executable).with_name("ninja")
    if beside.exists():
        return Check("ninja", "ok", str(beside))
    advice = "pip install ninja; DeepSpeed compiles operators with it on its first run"
    return Check("ninja", "fail", "not found", advice)


def accelerators() -> Check:
    """On what slots would train."""
    from trial_core.slots.accelerators import count_accelerators

    count = count_accelerators()
    if count == 0:
        return Check("accelerators", "ok", "none: slots are CPU processes")
    found = text_format.plural(count, "accelerator")
    try:
        torch_version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch_version = ""
    if torch_version.endswith("+cpu"):
        advice = "install a build of torch that can use them, or set DS_ACCELERATOR=cpu"
        return Check("accelerators", "fail", f"{found}, but torch {torch_version}", advice)
    return Check("accelerators", "ok", found)


def stored(config: Path | None, storage: str | None) -> Iterator[Check]:
    """Whether checkpoints can be stored, and how the registry keeps two writers apart."""
    try:
        store = open_store(config, storage)
        store.check_writable()
        yield Check("storage", "ok", f"{store.url} can be written")
        yield registry(store)
    except TrialflowError as error:
        yield Check("storage", "fail", str(error))


def registry(store: CheckpointStore) -> Check:
    """How the registry keeps two writers apart on that storage."""
    if store.storage.has_conditional_writes():
        return Check("registry", "ok", "conditional writes")
    return Check(
        "registry",
        "warn",
        "the storage has no conditional writes, so the registry uses a lock",
        "keep the clocks of all machines that promote models right to within minutes",
    )


def prefect_server() -> Check:
    """Whether the Prefect server that is configured, if one is, answers."""
    from trialflow.flows.server.embedded import configured_api_problem
    from trialflow.flows.server.prefect_settings import prepare_prefect

    prepare_prefect()
    from prefect.settings import get_current_settings

    api_url = get_current_settings().api.url
    if not api_url:
        return Check("server", "ok", "none configured: every run starts one for itself")
    problem = configured_api_problem()
    return Check("server", "fail", problem) if problem else Check("server", "ok", api_url)
