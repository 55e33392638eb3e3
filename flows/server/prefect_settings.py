"""Prefect's settings for a run on a terminal: little output, long timeouts, no telemetry.

Prefect reads its settings when it is imported, and sets up logging when its flows are. So a command
calls `prepare_prefect` first. Flow runs of a Prefect worker do not: their output is the worker's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from trialflow.flows.server.server_login import find_password

# Used where the user has set nothing (environment, .env, prefect.toml, profile).
DEFAULTS: Mapping[str, str] = {
    # Runs log to the API, and the UI shows it. The terminal has the progress bar.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    # The output of Prefect's background threads on stderr (its handler "debug").
    "PREFECT_LOGGING_HANDLERS_DEBUG_LEVEL": "CRITICAL",
    # Outside a run a logger would print a warning instead of sending its line.
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    # The first start after an installation takes longer than Prefect's 20 s.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
}
OF_TEMPORARY_SERVER = (
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS",
    "PREFECT_SERVER_ANALYTICS_ENABLED",
)
# With one of these set, the user wants Prefect's log on the console.
CONSOLE_REQUESTS = ("PREFECT_LOGGING_LEVEL", "PREFECT_LOGGING_CONFIG_PATH", "PREFECT_DEBUG_MODE")
CONSOLE_HANDLERS = "PREFECT_LOGGING_HANDLERS_"


def prepare_prefect(is_quiet: bool = True) -> None:
    """Set Prefect's defaults for a run on a terminal; the user's own settings win.

    Call it before flows are imported. Idempotent; imports Prefect (about 1 s).

    Args:
        is_quiet: True if the terminal has a display of its own, in place of Prefect's log.
    """
    # Prefect prints a notice on a newcomer's first import unless this is set. It is not a setting.
    os.environ.setdefault("DO_NOT_TRACK", "1")
    chosen = chosen_settings()
    wants_console = not is_quiet or any(name in chosen for name in CONSOLE_REQUESTS)
    for name, value in DEFAULTS.items():
        if name in chosen or (wants_console and name.startswith(CONSOLE_HANDLERS)):
            continue
        os.environ.setdefault(name, value)
    use_stored_password()


def prepare_temporary_server() -> None:
    """Give the temporary server that Prefect starts for a script time to start, and keep it quiet.

    Prefect allows 20 s, which a busy machine needs, and the server prints that it cannot reach its
    makers. The user's own settings win. Takes 80 ms if they are not known yet.
    """
    if "PREFECT_API_URL" in os.environ or all(name in os.environ for name in OF_TEMPORARY_SERVER):
        return
    chosen = chosen_settings()
    for name in OF_TEMPORARY_SERVER:
        if name not in chosen:
            os.environ.setdefault(name, DEFAULTS[name])
    reload_settings()


def use_stored_password() -> None:
    """Use the password of the configured server if trialflow started it and the user set none.

    Raises:
        ConfigError: another server is in the place of the one that trialflow started.
    """
    from prefect.settings import get_current_settings
    from pydantic import SecretStr

    settings = get_current_settings()
    secret = settings.api.auth_string
    chosen = secret.get_secret_value() if isinstance(secret, SecretStr) else secret
    password = find_password(settings.home, settings.api.url or "", chosen)
    if password is not None and not chosen:
        os.environ["PREFECT_API_AUTH_STRING"] = password
    reload_settings()


def chosen_settings() -> dict[str, str]:
    """Return the Prefect settings that the user has set anywhere, as environment variables.

    The names are Prefect's canonical ones.
    """
    from prefect.settings import get_current_settings

    return get_current_settings().to_environment_variables(exclude_unset=True)


def reload_settings() -> None:
    """Make Prefect read the environment again, for every thread of this process.

    `prefect.settings.temporary_settings` reaches only code that inherits this thread's context. A
    plain thread that logs would miss it, and start Prefect's own server.
    """
    import prefect.context

    prefect.context.GLOBAL_SETTINGS_CONTEXT = prefect.context.root_settings_context()


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the block, and make Prefect read them."""
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
