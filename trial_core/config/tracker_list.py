"""The list `trackers`: each entry is a tracker's name with its options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trial_core.config.error_text import format_value, validation_error
from trial_core.storage.credentials import secrets_in


def tracker_list(data: Any) -> Any:
    """Names without options become entries with none; refuses secrets, which would be stored.

    ``[mlflow, {wandb: {project: gpt}}]`` is ``[{mlflow: {}}, {wandb: {project: gpt}}]``.
    """
    if not isinstance(data, (list, tuple)):
        raise validation_error(f"expected a list of trackers, got {format_value(data)}")
    return [_entry(number, each) for number, each in enumerate(data)]


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
    if secrets_in("", given):
        raise validation_error(
            f"[{number}].{name}: passwords and keys are not written here, where checkpoints and "
            "flow runs would show them: give them by the tracker's environment variables, such as "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or WANDB_API_KEY"
        )
    return {str(name): {str(key): value for key, value in given.items()}}
