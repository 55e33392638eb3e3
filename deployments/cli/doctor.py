"""`trialflow doctor`: checks that this machine can train."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from trial_core.common import text_format
from trial_core.common.dependency_bounds import dependencies, out_of_bounds
from trial_core.errors import ConfigError, TrialflowError
from trialflow.deployments.cli import console
from trialflow.deployments.cli.check import Check, CheckStatus
from trialflow.deployments.cli.experiment_options import (
    DEFAULT_EXPERIMENT,
    HERE,
    Changes,
    Engine,
    Overrides,
    RunChanges,
    StoragePlace,
    read_any_experiment,
)
from trialflow.deployments.cli.json_output import AsJson, print_json
from trialflow.deployments.cli.waiting import waiting

NEEDED = ("trialflow", "torch", "deepspeed", "prefect", "fsspec")
FOR_OPERATORS = "for optimizers that DeepSpeed compiles: all but those of torch (torch_adam: true)"


def doctor(
    *,
    place: StoragePlace = HERE,
    set_: Overrides = None,
    engine: Engine | None = None,
    json_: AsJson = False,
) -> int:
    """Check packages, compiler, accelerators, storage and Prefect server, here or on all nodes.

    With --engine, also versions, clocks, memory, disks, and the nodes' network and storage.

    The exit code is 1 if a check fails, so that training is impossible, else 0.

    Args:
        engine: Also check each node that the experiment would train on with this engine; as
            resources.engine. Default: this machine alone.
    """
    if engine is None and set_ and place.experiment is None:
        raise ConfigError("--set changes an experiment: name it with --config")
    if engine is not None and place.config is None:
        # also with --storage: the experiment names the slots
        place = replace(place, config=DEFAULT_EXPERIMENT)
    checks = []
    for check in examine(place, set_ or [], engine):
        checks.append(check)
        if not json_:
            print(text_format.clean(str(check)), flush=True)
    if json_:
        print_json("doctor", {"checks": [asdict(check) for check in checks]})
    return console.FAILED if any(check.status == "fail" for check in checks) else 0


def examine(
    place: StoragePlace, overrides: list[str], engine: Engine | None = None
) -> Iterator[Check]:
    """Run all checks, one after the other.

    Args:
        engine: finds the experiment's nodes, which are checked, too; None to check no nodes.
    """
    yield Check("python", "ok", f"{platform.python_version()} ({sys.executable})")
    for package in NEEDED:
        yield installed(package)
    yield installed("s3fs", or_else="warn", advice="pip install s3fs, for s3:// storage")
    yield from other_dependencies()
    yield compiler()
    yield ninja()
    yield from accelerators()
    yield from stored(place, overrides)
    yield from deepspeed_configs(place.config, overrides)
    yield prefect_server()
    if engine is not None:
        changes = RunChanges(overrides, place.storage, engine)
        yield from nodes(place.config or DEFAULT_EXPERIMENT, changes)


def nodes(config: Path, changes: Changes) -> Iterator[Check]:
    """Check the nodes that the experiment would train on."""
    from trialflow.deployments.cli.node_checks import check_nodes

    try:
        experiment = read_any_experiment(config, changes)
    except ConfigError as error:
        advice = "--config names the experiment whose nodes are meant"
        yield Check("nodes", "fail", str(error), advice)
        return
    yield from check_nodes(experiment)


def installed(package: str, or_else: CheckStatus = "fail", advice: str = "") -> Check:
    """Check that a package is installed, and report its version.

    A version that is too old is a failure; one that is newer than the tried ones is a warning.
    """
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return Check(package, or_else, "not installed", advice or f"pip install {package}")
    if (problem := out_of_bounds(package)) is None:
        return Check(package, "ok", version)
    status: CheckStatus = or_else if problem.is_older else "warn"
    return Check(package, status, str(problem), f'pip install "{problem.expected}"')


def other_dependencies() -> Iterator[Check]:
    """Check the packages that are named only if they are missing or out of bounds."""
    for requirement in dependencies():
        if requirement.name not in (*NEEDED, "s3fs"):
            check = installed(requirement.name)
            if check.status != "ok":
                yield check


def compiler() -> Check:
    name = os.environ.get("CXX") or "g++"
    path = shutil.which(name)
    if path is None:
        advice = f"install it (apt install g++) {FOR_OPERATORS}"
        return Check("compiler", "warn", f"{name} not found", advice)
    return Check("compiler", "ok", path)


def ninja() -> Check:
    """Check that ninja is where ranks search for it: first in the environment, then on PATH."""
    own_first = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    path = shutil.which("ninja", path=os.pathsep.join(own_first))
    if path is not None:
        return Check("ninja", "ok", path)
    return Check("ninja", "warn", "not found", f"pip install ninja {FOR_OPERATORS}")


def accelerators() -> Iterator[Check]:
    """Report the devices that slots would train on, and check them in a process like a rank's."""
    from trial_core.processes.machine.accelerators import (
        NVIDIA,
        described,
        try_accelerators,
        visible_accelerators,
    )

    try:
        visible = visible_accelerators(os.environ)
    except TrialflowError as error:
        yield Check("accelerators", "fail", str(error))
        return
    if not visible.devices:
        yield Check("accelerators", "ok", "none: slots are CPU processes")
        return
    found = described(visible)
    with waiting("starting a process with the accelerators"):
        problem, nvcc = try_accelerators(visible)
    yield Check("accelerators", "fail" if problem else "ok", found, problem or "")
    if nvcc is not None:
        yield Check("nvcc", "warn", nvcc, f"needed {FOR_OPERATORS}")
    elif visible.kind == NVIDIA and problem is None:
        yield Check("nvcc", "ok", "of the same CUDA as torch")


def stored(place: StoragePlace, overrides: list[str] | None = None) -> Iterator[Check]:
    """Check that runs can use the storage."""
    try:
        store = place.open_store(overrides)
        with waiting(f"writing to {store.url}"):
            store.storage.check_usable()
        yield Check("storage", "ok", f"{store.url} is writable, and its writes can be create-only")
    except TrialflowError as error:
        yield Check("storage", "fail", str(error))


def deepspeed_configs(config: Path | None, overrides: list[str] | None = None) -> Iterator[Check]:
    """Check the DeepSpeed configs that the experiment's hyperparameters name for obsolete keys."""
    from trial_core.deepspeed.config_check import refusals, removals
    from trial_core.deepspeed.ds_config import overwrite_deepspeed_config

    if (file := StoragePlace(config).experiment) is None:
        return
    with suppress(ConfigError):  # `stored` has reported it
        experiment = read_any_experiment(file, Changes(overrides))
        for value in experiment.hyperparameters.values():
            path = experiment.code / str(value)
            if not str(value).endswith(".json") or not path.is_file():
                continue
            try:
                found = overwrite_deepspeed_config(path, {})
            except TrialflowError as error:
                yield Check("deepspeed", "fail", str(error))
            else:
                for problem in refusals(found) + removals(found):
                    yield Check("deepspeed", "fail", f"{path}: {problem}")


def prefect_server() -> Check:
    """Check that the Prefect server of runs answers, if it is running already."""
    from trialflow.flows.server.embedded_server import configured_api_problem, using_server_of_up
    from trialflow.flows.server.prefect_settings import prepare_prefect

    try:
        prepare_prefect()
        from prefect.settings import get_current_settings

        with waiting("asking the Prefect server"), using_server_of_up() as login:
            api_url = get_current_settings().api.url
            if not api_url:
                return Check("server", "ok", "none configured: each run starts its own")
            if problem := configured_api_problem():
                return Check("server", "fail", problem)
            return Check("server", "ok", f"{api_url}, of `trialflow up`" if login else api_url)
    except ConfigError as error:
        return Check("server", "fail", str(error))
