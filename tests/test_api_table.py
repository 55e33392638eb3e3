"""The table in docs/reference/determined-names.md about the reference's names matches the code."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import trial_core
import trial_core.core
import trial_core.deepspeed
import trial_core.pytorch
from tests.support.determined_names import NAMES
from trial_core.common.python_source import without_collections

# The tests of ranks import transformers, too, which takes seconds.
pytestmark = pytest.mark.xdist_group("ranks")
TABLE = Path(__file__).parents[1] / "docs" / "reference" / "determined-names.md"
ROWS = [
    (name, status)
    for names, status in re.findall(r"^\| (`.+?`) \| (.+?) \|", TABLE.read_text(), re.MULTILINE)
    for name in re.findall(r"`([A-Za-z0-9_.]+)`", names)
]
STATUSES = dict(ROWS)
EXISTS = {"works": True, "differs": True, "replaced": False, "not yet": False}
ENVIRONMENT_VARIABLES = {"DET_CHIEF_IP", "DET_LATEST_CHECKPOINT", "DET_MANUAL_INIT_DISTRIBUTED"}
FOR_THE_CONTROLLER = {"run_info", "training_batch", "steps_in_this_batch", "batch_ended"}
# Where the names of Determined's modules and classes are here.
HERE = {"pytorch.deepspeed": "deepspeed", "core.DistributedContext": "DistributedContext"}


def exists(name: str) -> bool:
    found: Any = trial_core
    for part in name.split("."):
        if inspect.isclass(found) and not hasattr(found, part):
            return part in attributes(found)
        if hasattr(found, "__path__") and find_spec(f"{found.__name__}.{part}") is not None:
            importlib.import_module(f"{found.__name__}.{part}")
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


@functools.cache
def attributes(kind: type) -> set[str]:
    """The attributes of a class's instances."""
    with without_collections():
        source = "".join(inspect.getsource(each) for each in kind.__mro__ if is_ours(each))
    fields = re.findall(r"^    (\w+): ", source, re.MULTILINE)
    return {*re.findall(r"self\.(\w+)(?:: .+?)? = ", source), *fields}


def is_ours(kind: type) -> bool:
    return kind.__module__.startswith("trial_core")


def here(name: str) -> str:
    """A name of Determined's, below `trial_core`."""
    for there, place in HERE.items():
        if f"{name}.".startswith(f"{there}."):
            return f"{place}{name.removeprefix(there)}"
    return name


def is_covered(name: str) -> bool:
    """Whether a name has a row, or one of what it belongs to says enough."""
    owners = [name[: dot.start()] for dot in re.finditer(r"\.", name)]
    if name in STATUSES or any(not EXISTS[STATUSES.get(owner, "works")] for owner in owners):
        return True
    return bool(owners) and owners[-1] in STATUSES and exists(name)


def test_every_name_of_the_reference_has_a_row() -> None:
    """Its own; or that of its class or module, which has been replaced or has such a name."""
    reference = [
        here(f"{owner}.{name}".lstrip("."))
        for owner, names in NAMES.items()
        for name in names.split()
    ]
    assert len(reference) > 700
    assert [name for name in reference if not is_covered(name)] == []


def test_the_status_of_each_name_is_right() -> None:
    """A name exists exactly if its status says so."""
    rows = [row for row in ROWS if row[0] not in ENVIRONMENT_VARIABLES]
    assert [row for row in rows if exists(row[0]) != EXISTS[row[1]]] == []


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
    of_scripts = ("core.TrainContext", "core.CheckpointContext", "core.PreemptContext",
                  "core.SearcherContext", "core.SearcherOperation")  # fmt: skip
    of_pytorch = ("PyTorchTrial", "PyTorchTrialContext", "PyTorchExperimentalContext",
                  "LRScheduler", "Trainer", "PyTorchCallback", "MetricReducer")  # fmt: skip
    for path in (*classes, *of_scripts, *(f"pytorch.{name}" for name in of_pytorch)):
        package, name = path.split(".")
        found = getattr(getattr(trial_core, package), name)
        methods = {f"{path}.{method}" for method in dir(found) if not method.startswith("_")}
        internal = {f"{path}.{method}" for method in FOR_THE_CONTROLLER}
        assert methods - internal - STATUSES.keys() == set()
