"""A trial that starts with another trial's checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.flow import train
from tests.support.slots import lines, toy_config
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig
from trial_core.errors import CheckpointDamaged, CheckpointNotFound

pytestmark = [pytest.mark.slots, pytest.mark.server]


def experiment(here: Path, slots: int, name: str, **searcher: Any) -> ExperimentConfig:
    """A run of 4 batches that validates before the first one, with records below `name`."""
    (here / name).mkdir()
    return toy_config(
        here, 4, name=name, resources={"slots_per_trial": slots}, perform_initial_validation=True,
        searcher={"metric": "loss", "max_length": {"batches": 4}, **searcher},
        hyperparameters={"record": str(here / name), "zero_stage": 3},
    )  # fmt: skip


def hook_calls(here: Path, name: str, hook: str) -> list[dict[str, Any]]:
    return [line for line in lines(here / name, "hooks", 0) if line["hook"] == hook]


@pytest.mark.long
def test_a_new_trial_starts_from_anothers_checkpoint(here: Path) -> None:
    """At batch 0 with the source's weights: its first validation equals the source's last."""
    source = train(experiment(here, 1, "source"))
    config = experiment(here, 1, "own", source_checkpoint_uuid=source.checkpoint_uuid[:8])
    result = train(config)

    (started,) = hook_calls(here, "own", "on_trial_startup")
    assert (started["first"], started["uuid"]) == (0, source.checkpoint_uuid)
    first, _ = hook_calls(here, "own", "on_validation_end")
    assert first["metrics"] == source.validation_metrics
    assert [line[0] for line in lines(here / "own", "samples", 0)] == [0, 1, 2, 3]
    assert result.trial != source.trial


@pytest.mark.long
def test_a_warm_started_trial_resumes_from_its_own_checkpoint(here: Path) -> None:
    """Once it has saved one."""
    source = train(experiment(here, 1, "source"))
    config = experiment(here, 1, "own", source_checkpoint_uuid=source.checkpoint_uuid)
    result = train(config)
    train(config, result.trial)
    assert hook_calls(here, "own", "on_trial_startup")[-1]["uuid"] == result.checkpoint_uuid


@pytest.mark.long
def test_a_trial_starts_on_any_number_of_slots(here: Path) -> None:
    """A ZeRO-3 checkpoint of one slot gives the same validation on two.

    With the weights alone, and with the optimizer's state.
    """
    source = train(experiment(here, 1, "source"))
    uuid = source.checkpoint_uuid
    for name, weights_only in (("weights", True), ("state", False)):
        train(
            experiment(here, 2, name, source_checkpoint_uuid=uuid, source_weights_only=weights_only)
        )
        first, _ = hook_calls(here, name, "on_validation_end")
        expected = pytest.approx(source.validation_metrics["loss"], rel=1e-5)
        assert first["metrics"]["loss"] == expected


@pytest.mark.long
def test_a_missing_or_damaged_source_checkpoint(here: Path) -> None:
    """The error names the damaged file; nothing is trained."""
    with pytest.raises(CheckpointNotFound, match=r"no checkpoint in file://.* begins with 'abcd'"):
        train(experiment(here, 1, "missing", source_checkpoint_uuid="abcd"))
    source = train(experiment(here, 1, "source"))
    config = experiment(here, 1, "own", source_checkpoint_uuid=source.checkpoint_uuid)
    store = CheckpointStore(config.checkpoint_storage.url)
    entry = max(store.open(source.checkpoint_uuid).files, key=lambda file: file.size_bytes)
    store.storage.remove(entry.key(source.checkpoint_uuid))
    with pytest.raises(
        CheckpointDamaged, match=f"the source checkpoint of the searcher: .*{entry.path}"
    ):
        train(config)
    assert lines(here / "own", "samples", 0) == []
