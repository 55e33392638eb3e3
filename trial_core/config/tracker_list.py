"""The list `trackers`: each entry is a tracker's name with its options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from trial_core.config.error_text import format_value, validation_error
from trial_core.storage.credentials import secrets_in


def tracker_list(data: Any) -> Any:
    """Names without options become entries with none; refuses secrets, which would be stored.

    ``[mlflow, {wandb: {project: gpt}}]`` is ``[{mlflow: {}}, {wandb: {project: gpt}}]``.
    """
    if not isinstance(data, (list, tuple)):
        raise validation_error(f"expected a list of trackers, got {format_value(data)}")
    entries = [_entry(number, each) for number, each in enumerate(data)]
    names = [name for each in entries for name in each]
    for name in names:
        if names.count(name) > 1:
            raise validation_error(f"{name} is there twice; a trial has one run in each tracker")
    return entries


def _may_hold_secrets(value: Any) -> bool:
    """Whether it is a URL with a user or a query: trackers take tokens and passwords there."""
    if not isinstance(value, str) or "://" not in value:
        return False
    place = urlsplit(value)
    return bool(place.query) or "@" in place.netloc


def _entry(number: int, entry: Any) -> dict[str, dict[str, Any]]:
    if isinstance(entry, str):
        return {entry: {}}
    if not isinstance(entry, Mapping) or len(entry) != 1:
        raise validation_error(
            f"[{number}]: expected one tracker with its options, such as {{mlflow: {{experiment: "
            f"gpt}}}}, got {format_value(entry)}"
        )
    ((name, options),) = entry.items()
    given = {} if options is None else options
    if not isinstance(given, Mapping):
        raise validation_error(
            f"[{number}].{name}: expected a mapping of options, got {format_value(options)}"
        )
    if secrets_in("", given) or any(_may_hold_secrets(value) for value in given.values()):
        raise validation_error(
            f"[{number}].{name}: passwords and keys are not written here, where checkpoints and "
            "flow runs would show them, nor URLs that may have them: give them by the tracker's "
            "environment variables, such as MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD, or WANDB_API_KEY"
        )
    return {str(name): {str(key): value for key, value in given.items()}}
