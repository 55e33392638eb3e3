"""Determined's forms and fields that trialflow reads differently, ignores or refuses."""

from __future__ import annotations

import re
import shlex
import warnings
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from trial_core.config.error_text import (
    IgnoredFieldWarning,
    Location,
    Problem,
    format_value,
    type_name,
    validation_error,
    validation_errors,
    warn_ignored,
)
from trial_core.config.values import to_plain_data
from trial_core.schedule.command import (
    COMMAND_PATTERN,
    LAUNCHERS,
    ScriptCommand,
    is_command,
    without_launcher,
)

_CLUSTER = "trialflow manages no cluster; use Prefect's work pools and queues"
_CONTAINER = "a slot is a process on its machine, not a container"
_SERVER = "it belongs to Determined's server"
_OTHER_SEARCHER = "only searchers that run several trials use it"
_OTHER_LENGTH = "max_length, or the script itself, says how long to train"

IGNORED = {
    "bind_mounts": "a slot is a process on its machine and sees that machine's folders",
    "data_layer": _SERVER,
    "debug": _SERVER,
    "integrations": _SERVER,
    "internal": _SERVER,
    "log_pattern_policies": _SERVER,
    "log_policies": _SERVER,
    "pbs": _CLUSTER,
    "preemption_timeout": _SERVER,
    "project": _SERVER,
    "records_per_epoch": "the training loader decides how long an epoch is",
    "retention_policy": _SERVER,
    "security": _SERVER,
    "slurm": _CLUSTER,
    "tensorboard_storage": "TensorBoard files are stored with the checkpoints",
    "webhooks": _SERVER,
    "workspace": _SERVER,
}

_HOROVOD = "torch's DistributedDataParallel replaces Horovod, and groups gradients itself"

IGNORED_OPTIMIZATIONS = {
    "auto_tune_tensor_fusion": _HOROVOD,
    "grad_updates_size_file": _HOROVOD,
    "mixed_precision": "call context.experimental.use_amp() in the trial",
    "tensor_fusion_cycle_time": _HOROVOD,
    "tensor_fusion_threshold": _HOROVOD,
}

IGNORED_PROFILING = {"sync_timings": "torch's profiler reads the accelerator's own clock"}

IGNORED_RESOURCES = {
    "agent_label": _CLUSTER,
    "devices": _CONTAINER,
    "is_single_node": _CLUSTER,
    "max_slots": _CLUSTER,
    "native_parallel": _CLUSTER,
    "priority": _CLUSTER,
    "resource_pool": _CLUSTER,
    "shm_size": _CONTAINER,
    "slots": "slots_per_trial sets the number of slots",
    "weight": _CLUSTER,
}

IGNORED_ENVIRONMENT = dict.fromkeys(
    (
        "add_capabilities",
        "drop_capabilities",
        "force_pull_image",
        "image",
        "pbs",
        "pod_spec",
        "ports",
        "proxy_ports",
        "registry_auth",
        "slurm",
    ),
    _CONTAINER,
)

_TIME = ("max_time", "time_metric")
IGNORED_SEARCHER = dict.fromkeys(_TIME, _OTHER_LENGTH) | dict.fromkeys(
    (
        "bracket_rungs",
        "budget",
        "divisor",
        "max_concurrent_trials",
        "max_rungs",
        "max_trials",
        "mode",
        "num_rungs",
        "stop_once",
        "train_stragglers",
        "unit",
    ),
    _OTHER_SEARCHER,
)

_CLASS_PATTERN = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
ENTRYPOINT_PATTERN = rf"^({_CLASS_PATTERN}|{COMMAND_PATTERN})$"


def entrypoint(value: Any) -> str:
    """``module:Class``, the value of ``--trial`` in a launcher's command line, or a command."""
    words = _words(value)
    if len(words) == 1 and re.fullmatch(_CLASS_PATTERN, words[0]):
        if ".py:" in words[0]:
            raise validation_error(
                f'{_expected(value)}; did you mean "{words[0].replace(".py:", ":")}"?'
            )
        return words[0]
    named = _after_trial_option(words)
    if named is not None and re.fullmatch(_CLASS_PATTERN, named):
        warn_ignored(
            f"entrypoint: only --trial {named} is used of this command; trialflow starts the ranks"
        )
        return named
    launcher, command = without_launcher(words)
    if launcher is not None and re.fullmatch(_CLASS_PATTERN, words[-1]):
        warn_ignored(f"entrypoint: {launcher} is not used; trialflow starts the ranks")
        return words[-1]
    script = ScriptCommand.parse(command)
    if script is None or (script.is_module and script.target in LAUNCHERS):
        raise validation_error(_expected(value) + _advice(words))
    if launcher is not None:
        warn_ignored(f"entrypoint: {launcher} is not used; trialflow starts the ranks")
    return script.text


def is_script(value: Any) -> bool:
    """Return whether an `entrypoint`, valid or not, is the command of a Core API script."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", IgnoredFieldWarning)
        try:
            return is_command(entrypoint(value))
        except ValidationError:
            return False


def _advice(words: list[str]) -> str:
    if len(words) < 2:
        return ""
    return (
        '; a command line is "python train.py [arguments]" or "python -m module [arguments]", '
        "or names a trial by --trial"
    )


def _words(value: Any) -> list[str]:
    if isinstance(value, list) and value and all(isinstance(word, str) for word in value):
        return list(value)
    if not isinstance(value, str):
        raise validation_error(_expected(value))
    try:
        return shlex.split(value)
    except ValueError:  # an open quote
        raise validation_error(_expected(value)) from None


def _expected(value: Any) -> str:
    seen = format_value(" ".join(map(str, value)) if isinstance(value, list) else value)
    return f'expected "module:Class", such as "model_def:MyTrial", got {seen}'


def _after_trial_option(words: list[str]) -> str | None:
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == "--trial":
            return following
        if word.startswith("--trial="):
            return word.removeprefix("--trial=")
    return None


def with_max_length(searcher: Any) -> Any:
    """A searcher with `max_length`: `max_time`, counted in `time_metric`, unless it has a length.

    A script's experiment always has one.
    """
    if not isinstance(searcher, Mapping) or searcher.get("max_length") is not None:
        return searcher
    time, unit = searcher.get("max_time"), searcher.get("time_metric")
    if time is None:
        return searcher
    if unit not in ("batches", "epochs"):
        raise validation_error(
            f'expected "batches" or "epochs", got {format_value(unit)}; or give the length of '
            "training as max_length: {batches: 1000}",
            "time_metric",
        )
    if type(time) is not int or time < 1:
        raise validation_error(f"expected a positive integer, got {format_value(time)}", "max_time")
    others = {name: each for name, each in searcher.items() if name not in _TIME}
    return {**others, "max_length": {unit: time}}


def hyperparameters(value: Any) -> Any:
    """Plain values and search ranges: ``{type: const, val: x}`` becomes x."""
    problems: list[Problem] = []
    # In this order: plain data are not too deep to walk through.
    values = _constants_resolved(to_plain_data(value, (), problems))
    if problems:
        raise validation_errors(problems)
    return values


def _constants_resolved(value: Any) -> Any:
    if isinstance(value, list):
        return [_constants_resolved(inner) for inner in value]
    if not isinstance(value, Mapping):
        return value
    if value.get("type") == "const" and set(value) == {"type", "val"}:
        return value["val"]
    return {key: _constants_resolved(inner) for key, inner in value.items()}


_DEVICES = ("cpu", "rocm", "gpu", "cuda")


def environment_variables(value: Any) -> Any:
    """Names and values from a mapping, a list of ``NAME=VALUE``, or such lists by device. Those are
    merged, because the device is not known yet; if they differ, the accelerator's value overrides
    the CPU's, with a warning."""
    if isinstance(value, list):
        return _assignments(value, ())
    if not isinstance(value, Mapping):
        raise validation_error(
            f"expected a mapping or a list of NAME=VALUE, got {type_name(value)}"
        )
    if value and all(k in _DEVICES and isinstance(v, (list, type(None))) for k, v in value.items()):
        return _merged(value)
    problems: list[Problem] = []
    variables = {str(name): _variable(str(name), text, problems) for name, text in value.items()}
    if problems:
        raise validation_errors(problems)
    return variables


def _variable(name: str, value: Any, problems: list[Problem]) -> str:
    if not name or "=" in name or "\0" in name:
        problems.append(((name,), "is not a valid name of an environment variable"))
    elif isinstance(value, str) and "\0" in value:
        problems.append(((name,), "has a NUL character, which no environment variable can have"))
    elif isinstance(value, bool) or not isinstance(value, (int, str)):
        advice = "; put it in quotes" if isinstance(value, (bool, float)) else ""
        problems.append(((name,), f"expected text, got {type_name(value)}{advice}"))
    return str(value)


def _assignments(items: list[Any], path: Location) -> dict[str, str]:
    variables: dict[str, str] = {}
    problems: list[Problem] = []
    for i, item in enumerate(items):
        if not isinstance(item, str) or item.find("=") < 1:
            # Do not show the item: it may be a secret without its name.
            seen = "text without a name and =" if isinstance(item, str) else type_name(item)
            problems.append(((*path, i), f"expected NAME=VALUE, got {seen}"))
            continue
        name, _, value = item.partition("=")
        variables[name] = _variable(name, value, problems)
    if problems:
        raise validation_errors(problems)
    return variables


def _merged(by_device: Mapping[str, list[Any] | None]) -> dict[str, str]:
    merged: dict[str, str] = {}
    for device in _DEVICES:
        for name, value in _assignments(by_device.get(device) or [], (device,)).items():
            if merged.get(name, value) != value:
                warn_ignored(
                    f"environment.environment_variables: {name} differs between devices; "
                    f"the value for {device} is used"
                )
            merged[name] = value
    return merged
