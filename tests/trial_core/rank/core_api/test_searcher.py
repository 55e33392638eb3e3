"""The one operation of a run: how long to train, and the mistakes of scripts that use it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import trial_core
from tests.trial_core.rank.core_api.test_script_host import Slot
from trial_core.config import ExperimentConfig
from trial_core.core import SearcherMode, SearcherOperation, Unit
from trial_core.errors import ConfigError, TrialError
from trial_core.messages import Activity


def slot(run_dir: Path, rank: int = 0, **searcher: Any) -> Slot:
    """A script in a slot, of an experiment with these fields of `searcher`."""
    experiment = ExperimentConfig.from_mapping(
        {"entrypoint": "python train.py", "searcher": {"metric": "loss", **searcher}}
    )
    return Slot(run_dir, rank, experiment.model_dump(mode="json"))


def first(script: Slot) -> SearcherOperation:
    return next(iter(script.context.searcher.operations()))


@pytest.mark.parametrize(
    ("max_length", "length", "unit"),
    [
        ({"batches": 30}, 30, Unit.BATCHES),
        ({"epochs": 3}, 3, Unit.EPOCHS),
        (30, 30, Unit.BATCHES),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_is_one_operation(
    tmp_path: Path, rank: int, max_length: Any, length: int, unit: Unit
) -> None:
    """Of the configured length, on every rank, which do not wait for each other."""
    script = slot(tmp_path, rank, max_length=max_length)
    seen = []
    for operation in script.context.searcher.operations():
        seen.append(operation.length)
        if rank == 0:
            operation.report_completed(0.5)
    assert seen == [length]
    assert script.context.searcher.get_configured_units() is unit


def test_progress_is_shown_as_the_scripts_status(tmp_path: Path) -> None:
    """Also that of the end, after the operation was completed."""
    script = slot(tmp_path, max_length={"epochs": 3})
    operation = first(script)
    operation.report_progress(1.5)
    operation.report_completed(None)
    operation.report_progress(3)
    assert script.sent == [Activity(text="1.5 of 3 epochs"), Activity(text="3 of 3 epochs")]


def test_a_script_may_leave_an_operation(tmp_path: Path) -> None:
    """When it was told to stop. It may not ask for the next one."""
    script = slot(tmp_path, max_length={"batches": 3})
    for _ in script.context.searcher.operations():
        break
    with pytest.raises(TrialError, match="ended without a call of its report_completed"):
        list(script.context.searcher.operations())


def test_without_a_length_there_is_no_operation(tmp_path: Path) -> None:
    """The error says where to set it."""
    script = slot(tmp_path)
    assert script.context.searcher.get_configured_units() is None
    with pytest.raises(TrialError, match=r"set searcher\.max_length, such as \{batches: 1000\}"):
        first(script)


def test_mistakes_on_rank_0(tmp_path: Path) -> None:
    """A second end, progress after it, and progress that is no number."""
    operation = first(slot(tmp_path, max_length={"batches": 3}))
    with pytest.raises(TrialError, match="report_progress takes a number, got '1'"):
        operation.report_progress("1")  # type: ignore[arg-type]
    operation.report_completed(1.0)
    with pytest.raises(TrialError, match="report_completed was called twice"):
        operation.report_completed(1.0)
    with pytest.raises(TrialError, match=r"report_progress\(2\) was called after report_completed"):
        operation.report_progress(2)


def test_rank_0_reports(tmp_path: Path) -> None:
    """Other ranks are refused, as with metrics; with ChiefOnly also their question."""
    script = slot(tmp_path, 1, max_length={"batches": 3})
    operation = first(script)
    with pytest.raises(TrialError, match="report_progress was called on rank 1: call it on rank 0"):
        operation.report_progress(1)
    with pytest.raises(TrialError, match="report_completed was called on rank 1"):
        operation.report_completed(1.0)
    with pytest.raises(TrialError, match=r"called on rank 1 with SearcherMode\.ChiefOnly"):
        next(iter(script.context.searcher.operations(SearcherMode.ChiefOnly)))


def test_without_a_driver_exp_conf_has_the_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is checked as that of an experiment file. None is needed: a script may end itself."""
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path / "home"))

    def script(searcher: Mapping[str, Any]) -> Any:
        return trial_core.init(
            exp_conf={"searcher": searcher, "checkpoint_storage": str(tmp_path / "stored")}
        )

    with script({"metric": "loss", "max_length": {"epochs": 4}}) as context:
        assert [each.length for each in _completed(context)] == [4]
    with script({"metric": "loss"}) as context, pytest.raises(TrialError, match="in exp_conf"):
        _completed(context)
    with pytest.raises(ConfigError, match=r"exp_conf: searcher\.max_length\.batches: expected a p"):
        script({"max_length": {"batches": 0}}).__enter__()


def _completed(context: Any) -> list[SearcherOperation]:
    operations = []
    for operation in context.searcher.operations():
        operation.report_completed(0.0)
        operations.append(operation)
    return operations
