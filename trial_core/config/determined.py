"""What Determined's experiment files may say that trialflow says otherwise, or not at all."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from trial_core.config.error_text import (
    Location,
    Problem,
    kind,
    refusal,
    refusals,
    shown,
    warn_ignored,
)
from trial_core.config.values import as_plain

_CLUSTER = "there is no cluster to choose or divide; work pools and queues do that"
_CONTAINER = "a slot is a process of its machine, not a container"
_SERVER = "it belongs to Determined's server"
_OTHER_SEARCHER = "only searchers of several trials use it"

IGNORED = {
    "bind_mounts": "a slot is a process of its machine and sees that machine's folders",
    "data_layer": _SERVER,
    "debug": _SERVER,
    "integrations": _SERVER,
    "internal": _SERVER,
    "log_pattern_policies": _SERVER,
    "log_policies": _SERVER,
    "optimizations": "give gradient accumulation, clipping and precision in the DeepSpeed config",
    "pbs": _CLUSTER,
    "preemption_timeout": _SERVER,
    "profiling": "there is no profiler of this kind",
    "project": _SERVER,
    "records_per_epoch": "an epoch is as long as the training loader says",
    "retention_policy": _SERVER,
    "security": _SERVER,
    "slurm": _CLUSTER,
    "tensorboard_storage": "TensorBoard files are not collected",
    "webhooks": _SERVER,
    "workspace": _SERVER,
}

IGNORED_RESOURCES = {
    "agent_label": _CLUSTER,
    "devices": _CONTAINER,
    "is_single_node": _CLUSTER,
    "max_slots": _CLUSTER,
    "native_parallel": _CLUSTER,
    "priority": _CLUSTER,
    "resource_pool": _CLUSTER,
    "shm_size": _CONTAINER,
    "slots": "slots_per_trial says how many slots there are",
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

IGNORED_SEARCHER = dict.fromkeys(
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
        "time_metric",
        "train_stragglers",
    ),
    _OTHER_SEARCHER,
)

# To ignore a warm start would train something else than was asked for.
REFUSED_SEARCHER = {
    "source_trial_id": "Determined's server knew a trial's last checkpoint by that number; give "
    "the checkpoint itself: source_checkpoint_uuid",
}

ENTRYPOINT_PATTERN = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$"


def entrypoint(value: Any) -> str:
    """``module:Class``, also out of a launcher's command line that names it after ``--trial``."""
    words = _words(value)
    if len(words) == 1 and re.match(ENTRYPOINT_PATTERN, words[0]):
        if ".py:" in words[0]:
            raise refusal(f'{_expected(value)}; did you mean "{words[0].replace(".py:", ":")}"?')
        return words[0]
    named = _after_trial_option(words)
    if named is None or not re.match(ENTRYPOINT_PATTERN, named):
        advice = "" if len(words) < 2 else "; a command is understood only if it says --trial"
        raise refusal(_expected(value) + advice)
    warn_ignored(
        f"entrypoint: of this command only --trial {named} is used; trialflow starts the ranks"
    )
    return named


def _words(value: Any) -> list[str]:
    if isinstance(value, list) and value and all(isinstance(word, str) for word in value):
        return list(value)
    if not isinstance(value, str):
        raise refusal(_expected(value))
    try:
        return shlex.split(value)
    except ValueError:  # an open quote
        raise refusal(_expected(value)) from None


def _expected(value: Any) -> str:
    seen = shown(" ".join(map(str, value)) if isinstance(value, list) else value)
    return f'expected "module:Class", such as "model_def:MyTrial", got {seen}'


def _after_trial_option(words: list[str]) -> str | None:
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == "--trial":
            return following
        if word.startswith("--trial="):
            return word.removeprefix("--trial=")
    return None


def hyperparameters(value: Any) -> Any:
    """Plain values: ``{type: const, val: x}`` is x, and a range to search is refused."""
    problems: list[Problem] = []
    values = as_plain(_one_value_each(value, (), problems), (), problems)
    if problems:
        raise refusals(problems)
    return values


def _one_value_each(value: Any, path: Location, problems: list[Problem]) -> Any:
    if isinstance(value, (list, tuple)):
        return [_one_value_each(inner, (*path, i), problems) for i, inner in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    type_ = value.get("type")
    if type_ == "const" and set(value) == {"type", "val"}:
        return value["val"]
    if type_ in ("int", "double", "log", "categorical") and {"minval", "maxval", "vals"} & {*value}:
        problems.append(
            (
                path,
                f'is a range to search (type "{type_}"), but a run trains one trial: give a value',
            )
        )
    return {key: _one_value_each(inner, (*path, key), problems) for key, inner in value.items()}


_DEVICES = ("cpu", "rocm", "gpu", "cuda")


def environment_variables(value: Any) -> Any:
    """Names and values, out of a mapping, a list of ``NAME=VALUE``, or such lists by device.

    Lists by device are joined, as the config is made before anybody knows where it runs; where
    they differ, an accelerator's value wins over the CPU's, with a warning.
    """
    if isinstance(value, list):
        return _assignments(value, ())
    if not isinstance(value, Mapping):
        raise refusal(f"expected a mapping or a list of NAME=VALUE, got {kind(value)}")
    if value and all(k in _DEVICES and isinstance(v, (list, type(None))) for k, v in value.items()):
        return _joined(value)
    problems: list[Problem] = []
    variables = {str(name): _variable(str(name), text, problems) for name, text in value.items()}
    if problems:
        raise refusals(problems)
    return variables


def _variable(name: str, value: Any, problems: list[Problem]) -> str:
    if not name or "=" in name or "\0" in name:
        problems.append(((name,), "is no name of an environment variable"))
    elif isinstance(value, bool) or not isinstance(value, (int, str)):
        advice = "; put it in quotes" if isinstance(value, (bool, float)) else ""
        problems.append(((name,), f"expected text, got {kind(value)}{advice}"))
    return str(value)


def _assignments(items: list[Any], path: Location) -> dict[str, str]:
    variables: dict[str, str] = {}
    problems: list[Problem] = []
    for i, item in enumerate(items):
        if not isinstance(item, str) or item.find("=") < 1:
            # The item is not shown: it may be a secret whose name was forgotten.
            seen = "text without a name and =" if isinstance(item, str) else kind(item)
            problems.append(((*path, i), f"expected NAME=VALUE, got {seen}"))
            continue
        name, _, value = item.partition("=")
        variables[name] = value
    if problems:
        raise refusals(problems)
    return variables


def _joined(by_device: Mapping[str, list[Any] | None]) -> dict[str, str]:
    joined: dict[str, str] = {}
    for device in _DEVICES:
        for name, value in _assignments(by_device.get(device) or [], (device,)).items():
            if joined.get(name, value) != value:
                warn_ignored(
                    f"environment.environment_variables: {name} differs between devices; "
                    f"the value for {device} is used"
                )
            joined[name] = value
    return joined
