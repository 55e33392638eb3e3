"""Holds the table in docs/reference/determined-names.md against the code."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

import trial_core
import trial_core.deepspeed
import trial_core.pytorch

TABLE = Path(__file__).parents[1] / "docs" / "reference" / "determined-names.md"
ROWS = re.findall(r"^\| `([A-Za-z_.]+)` \| (.+?) \|", TABLE.read_text(), flags=re.MULTILINE)
STATUSES = dict(ROWS)
IS_THERE = {"works": True, "differs": True, "replaced": False, "not yet": False}
# An environment variable, and an attribute that only instances have.
NO_NAMES_OF_MODULES = {"DET_MANUAL_INIT_DISTRIBUTED", "deepspeed.DeepSpeedTrialContext.distributed"}


def is_there(name: str) -> bool:
    found: Any = trial_core
    for part in name.split("."):
        if found is trial_core.pytorch and part == "samplers":
            found = importlib.import_module("trial_core.pytorch.data.samplers")
        elif not hasattr(found, part):
            return False
        else:
            found = getattr(found, part)
    return True


@pytest.mark.parametrize(
    ("name", "status"), [row for row in ROWS if row[0] not in NO_NAMES_OF_MODULES]
)
def test_the_table_is_true(name: str, status: str) -> None:
    """What is said to be there is there, what is said to be missing is missing."""
    assert is_there(name) == IS_THERE[status], f'docs/reference/determined-names.md says "{status}"'


def test_each_name_has_one_row() -> None:
    """No name is spoken of twice."""
    assert len(ROWS) == len(STATUSES)


def test_every_public_name_has_a_row() -> None:
    """What the packages export is in the table; so is every public method of its classes."""
    exported = {f"deepspeed.{name}" for name in trial_core.deepspeed.__all__}
    exported |= {f"pytorch.{name}" for name in trial_core.pytorch.__all__}
    assert exported - {"pytorch.deepspeed"} - STATUSES.keys() == set()
    classes = ("deepspeed.DeepSpeedTrial", "deepspeed.DeepSpeedTrialContext", "deepspeed.Trainer")
    for path in (*classes, "pytorch.PyTorchCallback", "pytorch.MetricReducer"):
        package, name = path.split(".")
        found = getattr(getattr(trial_core, package), name)
        methods = {f"{path}.{method}" for method in dir(found) if not method.startswith("_")}
        # For the controller, not for trials.
        assert methods - {f"{path}.run_info"} - STATUSES.keys() == set()
