"""The configurations of champion and challenger, and the timer of a callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.manifests import new_manifest
from tests.support.slots import toy_config
from trial_core.errors import ConfigError, TrialError
from trial_core.models.journal import RetrainingPlan
from trial_core.models.records import Version
from trial_core.schedule.stop_requests import StopHandler
from trialflow.tasks.retrain import RetrainingRun, _check_callbacks, grace_timer

PLAN = RetrainingPlan(
    trial="toy-1", scheduled_at="2026-03-01T03:00:00Z", begun_at="2026-03-01T03:00:00Z",
    data={"day": "2026-03-01"}, champion=1, move=1,
)  # fmt: skip


def retraining(folder: Path, start: str = "scratch", **changes: Any) -> RetrainingRun:
    config = toy_config(folder, data={"day": "{{ x }}"}, retraining={"start": start}, **changes)
    return RetrainingRun(config, "run-1")


def champion(found: RetrainingRun, entrypoint: str = "metric_trials:Old") -> Version:
    """A version with another entrypoint and other hyperparameters."""
    manifest = new_manifest(entrypoint=entrypoint, hyperparameters={"width": 3})
    found.store.commit(manifest)
    return found.registry.register(
        "toy", manifest, metric="loss", smaller_is_better=True, value=None
    )


@pytest.mark.parametrize(
    ("start", "weights_only"), [("warm", True), ("continue", False), ("scratch", None)]
)
def test_the_source_of_a_challenger(tmp_path: Path, start: str, weights_only: bool | None) -> None:
    """The champion's weights, its whole state, or nothing; always with the run's data."""
    found = retraining(tmp_path, start)
    version = champion(found)
    searcher = found.challenger_config(PLAN, version).searcher
    if weights_only is None:
        assert searcher.source_checkpoint_uuid is None
    else:
        assert searcher.source_checkpoint_uuid == version.checkpoint
        assert searcher.source_weights_only is weights_only
    for config in (
        found.challenger_config(PLAN, version),
        found.challenger_config(PLAN, None),
        found.champion_config(PLAN, version),
    ):
        assert config.data == {"day": "2026-03-01"}
    assert found.challenger_config(PLAN, None).searcher == found.config.searcher


def test_a_callback_is_cancelled_after_any_stop_request() -> None:
    """When the grace period is over, also for requests without a deadline."""
    with StopHandler(3600) as stopping:
        assert not grace_timer(stopping, 0.0)()
        stopping.ask("suspended", "in Prefect")
        assert stopping.wait(10)
        assert not stopping.has_expired
        assert grace_timer(stopping, 0.0)()
        assert not grace_timer(stopping, 3600)()


def test_the_source_in_the_experiment(tmp_path: Path) -> None:
    """It is kept from scratch, and without a champion."""
    source = {"metric": "loss", "max_length": {"batches": 4}, "source_checkpoint_uuid": "base"}
    for start, version in (("scratch", True), ("warm", False)):
        found = retraining(tmp_path / start, start, searcher=source)
        given = champion(found) if version else None
        searcher = found.challenger_config(PLAN, given).searcher
        assert searcher.source_checkpoint_uuid == "base"


def test_a_champion_is_validated_as_it_was_trained(tmp_path: Path) -> None:
    """With its own entrypoint and hyperparameters, but the present slots and code."""
    found = retraining(tmp_path)
    config = found.champion_config(PLAN, champion(found))
    assert (config.entrypoint, config.hyperparameters) == ("metric_trials:Old", {"width": 3})
    assert (config.resources, config.code) == (found.config.resources, found.config.code)


@pytest.mark.parametrize(
    "entrypoint", ["python -m timeit pass", "python ../x.py", "antigravity:Trial", "/tmp/x:Trial"]
)
def test_a_champion_names_no_program_of_this_machine(tmp_path: Path, entrypoint: str) -> None:
    """Writers to the storage choose the champion; its code must be in the run's code folder."""
    found = retraining(tmp_path)
    with pytest.raises(TrialError, match=r"expected module:Class of .*toy"):
        found.champion_config(PLAN, champion(found, entrypoint))


def test_a_champion_keeps_its_entrypoint_with_its_own_code(tmp_path: Path) -> None:
    """The code of the checkpoint is asked for, so its entrypoint counts."""
    found = retraining(tmp_path, environment={"code": "from_checkpoint"})
    config = found.champion_config(PLAN, champion(found, "gone:Trial"))
    assert config.entrypoint == "gone:Trial"


def test_a_callback_needs_the_code_folder(tmp_path: Path) -> None:
    """Also if the trial's code is that of a checkpoint. That is said before the training."""
    found = retraining(tmp_path, code=str(tmp_path / "gone"))
    settings = found.settings.model_copy(update={"callbacks": ["callbacks:tell"]})
    found.settings = settings
    with pytest.raises(ConfigError, match=r"callbacks\[0\]: callbacks:tell cannot .*gone"):
        _check_callbacks(found)
