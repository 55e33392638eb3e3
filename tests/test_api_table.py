"""The table in docs/reference/determined-names.md about the reference's names matches the code."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

import trial_core
import trial_core.core
import trial_core.deepspeed
import trial_core.pytorch

TABLE = Path(__file__).parents[1] / "docs" / "reference" / "determined-names.md"
ROWS = re.findall(r"^\| `([A-Za-z_.]+)` \| (.+?) \|", TABLE.read_text(), flags=re.MULTILINE)
STATUSES = dict(ROWS)
EXISTS = {"works": True, "differs": True, "replaced": False, "not yet": False}
# An environment variable, and an attribute that only instances have.
NOT_ATTRIBUTES = {"DET_MANUAL_INIT_DISTRIBUTED", "deepspeed.DeepSpeedTrialContext.distributed"}


def exists(name: str) -> bool:
    found: Any = trial_core
    for part in name.split("."):
        if found is trial_core.pytorch and part == "samplers":
            found = importlib.import_module("trial_core.pytorch.data.samplers")
        elif not hasattr(found, part):
            return False
        else:
            found = getattr(found, part)
    return True


@pytest.mark.parametrize(("name", "status"), [row for row in ROWS if row[0] not in NOT_ATTRIBUTES])
def test_the_status_of_a_name_is_right(name: str, status: str) -> None:
    """A name exists exactly if its status says so."""
    assert exists(name) == EXISTS[status], f'docs/reference/determined-names.md says "{status}"'


def test_each_name_has_one_row() -> None:
    """No name has two rows."""
    assert len(ROWS) == len(STATUSES)


def test_every_public_name_has_a_row() -> None:
    """Every exported name and every public method of the exported classes has a row."""
    exported = {f"deepspeed.{name}" for name in trial_core.deepspeed.__all__}
    exported |= {f"pytorch.{name}" for name in trial_core.pytorch.__all__}
    exported |= {f"core.{name}" for name in trial_core.core.__all__}
    assert exported - {"pytorch.deepspeed"} - STATUSES.keys() == set()
    classes = ("deepspeed.DeepSpeedTrial", "deepspeed.DeepSpeedTrialContext", "deepspeed.Trainer")
    of_scripts = ("core.TrainContext", "core.CheckpointContext", "core.PreemptContext")
    for path in (*classes, *of_scripts, "pytorch.PyTorchCallback", "pytorch.MetricReducer"):
        package, name = path.split(".")
        found = getattr(getattr(trial_core, package), name)
        methods = {f"{path}.{method}" for method in dir(found) if not method.startswith("_")}
        # run_info is for the controller.
        assert methods - {f"{path}.run_info"} - STATUSES.keys() == set()
