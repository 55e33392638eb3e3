"""The names of trials, and the folders of their runs."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from trial_core.config import home_folder
from trial_core.errors import TrialflowError


def slug(name: str) -> str:
    """An experiment's name as part of a trial's id: lower case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60] or "trial"


def trial_id(name: str, unique: str) -> str:
    """A trial's id, from its experiment's name and something unique to it."""
    return f"{slug(name)}-{unique.replace('-', '')[:8]}"


def prepare_run_dir(trial: str) -> Path:
    """The folder of `trial` on this machine, without what a dead attempt has left staged there.

    Raises:
        TrialflowError: it cannot be created.
    """
    run_dir = home_folder() / trial
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        for leftover in ("staging", "restored"):
            shutil.rmtree(run_dir / leftover, ignore_errors=True)
    except OSError as error:
        raise TrialflowError(
            f"cannot create the run's folder {run_dir}: {error.strerror}; set TRIALFLOW_HOME to a "
            "folder that can be written"
        ) from error
    return run_dir
