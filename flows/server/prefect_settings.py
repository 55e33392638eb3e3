"""What Prefect is told before a run on a terminal: be quiet, be patient, send nothing out.

Prefect reads its settings when it is imported and sets up logging when its flows are, so
`prepare_prefect` comes first in a command. A flow that a Prefect worker runs never comes here: its
output belongs to the worker.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

# Only what the user has set nowhere (environment, .env, prefect.toml, profile) is taken from here.
DEFAULTS: Mapping[str, str] = {
    # Runs log to the API, where the UI shows them. On the terminal the progress bar speaks.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    # Prefect's own background threads, complaining to stderr (its name for that handler: debug).
    "PREFECT_LOGGING_HANDLERS_DEBUG_LEVEL": "CRITICAL",
    # A logger used outside a run would print a warning instead of being sent.
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    # The first start on a fresh install takes longer than Prefect's 20 s.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
}
# Whoever asks Prefect for a certain logging wants to see it.
ASKS_FOR_CONSOLE = ("PREFECT_LOGGING_LEVEL", "PREFECT_LOGGING_CONFIG_PATH", "PREFECT_DEBUG_MODE")
CONSOLE_HANDLERS = "PREFECT_LOGGING_HANDLERS_"


def prepare_prefect() -> None:
    """Set Prefect's defaults for a run on a terminal. Idempotent; imports Prefect (about 1 s).

    Call it before flows are imported. The user's own settings win, whatever their source.
    """
    # No Prefect setting, and read while Prefect is imported: without it, a newcomer's first import
    # prints a notice on the terminal.
    os.environ.setdefault("DO_NOT_TRACK", "1")
    chosen = chosen_settings()
    wants_console = any(name in chosen for name in ASKS_FOR_CONSOLE)
    for name, value in DEFAULTS.items():
        if name in chosen or (wants_console and name.startswith(CONSOLE_HANDLERS)):
            continue
        os.environ.setdefault(name, value)
    reload_settings()


def chosen_settings() -> dict[str, str]:
    """The Prefect settings that differ from Prefect's defaults by someone's choice.

    As environment variables by their canonical names, whichever of Prefect's sources they are from.
    """
    from prefect.settings import get_current_settings

    return get_current_settings().to_environment_variables(exclude_unset=True)


def reload_settings() -> None:
    """Make Prefect read the environment again, for every thread of this process.

    `prefect.settings.temporary_settings` reaches only code that inherits this thread's context; a
    plain thread that logs would miss it and start Prefect's own server.
    """
    import prefect.context

    prefect.context.GLOBAL_SETTINGS_CONTEXT = prefect.context.root_settings_context()


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables and have Prefect see them, for the length of the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    reload_settings()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        reload_settings()
