"""Each cell of the table of DeepSpeed's features is what the matrix says.

`make features` runs all, and writes the page from the results.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

from tests.trial_core.deepspeed.features.feature import Cell, Column, Feature
from tests.trial_core.deepspeed.features.laboratory import Laboratory
from tests.trial_core.deepspeed.features.matrix import FEATURES, REMOVED_KEYS
from tests.trial_core.deepspeed.features.page import (
    PAGE,
    RESULTS,
    ROOT,
    page,
    text_of,
    this_machine,
)
from trial_core.errors import RankFailed, TrialflowError
from trial_core.processes.machine.accelerators import count_accelerators
from trial_core.processes.slots.slot_group import SlotGroup

GPUS = count_accelerators()
CELLS = [
    pytest.param(
        feature, column, cell, id=f"{feature.name}-{column}",
        marks=() if feature.is_default else pytest.mark.long,
    )
    for feature in (each.on_gpus() if GPUS else each for each in FEATURES)
    for column, cell in feature.cells
    if not cell.test
]  # fmt: skip


@pytest.fixture(scope="module")
def laboratory(
    warm_slots: Callable[[int], SlotGroup], tmp_path_factory: pytest.TempPathFactory
) -> Laboratory:
    """Runs the trials of features."""
    return Laboratory(warm_slots, tmp_path_factory.mktemp("features"))


@pytest.mark.slots
@pytest.mark.timeout(1200)  # the first of some compiles an operator
@pytest.mark.parametrize(("feature", "column", "cell"), CELLS)
def test_feature(
    laboratory: Laboratory, feature: Feature, column: Column, cell: Cell,
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    """Each cell works, is refused, fails or is wrong as the matrix says, and not better either."""
    lacks = feature.lacks(column, GPUS)
    record_property("row", feature.name)
    record_property("column", column)
    record_property("run", this_machine())
    record_property("device", "gpu" if GPUS else "cpu")
    record_property("feature", feature.digest)
    record_property("result", lacks or text_of(cell))
    if lacks:
        pytest.skip(lacks)
    seen, error = observed(lambda: laboratory.check(feature, column))
    if seen != cell.outcome or cell.words not in _text(error):
        expected = f"{cell.outcome} {cell.words}".strip()
        raise AssertionError(f"{seen}, but the matrix says {expected}: {_text(error)}") from error


def observed(check: Callable[[], None]) -> tuple[str, Exception | None]:
    """The outcome of a check, and its error."""
    try:
        check()
    except RankFailed as error:
        return ("refused" if error.is_ours else "fails"), error
    except TrialflowError as error:
        return "refused", error
    except AssertionError as error:
        return "wrong", error
    return "works", None


def _text(error: Exception | None) -> str:
    if isinstance(error, RankFailed):
        return f"{error}\n{error.error_message}\n{error.rank_traceback}"
    return str(error or "")


@pytest.mark.parametrize("key", REMOVED_KEYS)
def test_a_removed_key_is_refused(key: str) -> None:
    """A config with a section or option that DeepSpeed has removed builds no engine."""
    outer, _, inner = key.partition(".")
    config = {"train_batch_size": 2, outer: {inner: 1} if inner else {"enabled": True}}
    with pytest.raises(DeepSpeedConfigError, match="has been removed"):
        DeepSpeedConfig(config)


def test_the_page_is_made_of_the_results() -> None:
    """Each row and cell of the matrix has a result, and the page says it."""
    results = {device: json.loads(path.read_text()) for device, path in RESULTS.items()}
    assert PAGE.read_text() == page(FEATURES, results["cpu"], results["gpu"])


def test_the_other_tests_of_the_page_exist() -> None:
    """Those that hold cells, and are not tests of the matrix."""
    tests = {cell.test for feature in FEATURES for _, cell in feature.cells if cell.test}
    for test in tests:
        path, _, name = test.partition("::")
        text = (ROOT / path).read_text()
        assert re.search(rf"^def {name.partition('[')[0]}\(", text, flags=re.MULTILINE), test


def test_rows_have_distinct_names() -> None:
    """A name is the id of a row's tests."""
    names = [feature.name for feature in FEATURES]
    assert len(set(names)) == len(names)
