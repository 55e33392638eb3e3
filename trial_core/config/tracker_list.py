"""The list `trackers`: each entry is a tracker's name with its options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trial_core.checkpoint.storage.credentials import secrets_in
from trial_core.config.error_text import format_value, validation_error
from trial_core.config.values import validate_plain_mapping

# A URL with a user or a query: trackers take tokens and passwords there.
_MAY_HAVE_A_SECRET = re.compile(r"://([^/\s]*@|.*\?.)")


def tracker_list(data: Any) -> Any:
    """The list with all names as entries with options: ``[mlflow]`` is ``[{mlflow: {}}]``; an
    option that is null has its default. Refuses secrets, which would be stored."""
    if not isinstance(data, (list, tuple)):
        raise validation_error(f"expected a list of trackers, got {format_value(data)}")
    entries = [_entry(number, each) for number, each in enumerate(data)]
    names = [name for each in entries for name in each]
    for name in names:
        if names.count(name) > 1:
            raise validation_error(f"{name} is there twice; a trial has one run in each tracker")
    return entries


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
    given = validate_plain_mapping(given)
    if secrets_in("", given) or _may_have_secrets(given):
        raise validation_error(
            f"[{number}].{name}: passwords and keys are not written here, where checkpoints and "
            "flow runs would show them, nor URLs that may have them: give them by the tracker's "
            "environment variables, such as MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD, or WANDB_API_KEY"
        )
    return {str(name): {key: value for key, value in given.items() if value is not None}}


def _may_have_secrets(value: Any) -> bool:
    if isinstance(value, (Mapping, list)):
        inner = value.values() if isinstance(value, Mapping) else value
        return any(map(_may_have_secrets, inner))
    return isinstance(value, str) and _MAY_HAVE_A_SECRET.search(value) is not None
