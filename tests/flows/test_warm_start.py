"""A trial that starts from another trial's checkpoint, through the flow and on real ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.prefect import PrefectServer
from tests.support.slots import lines, toy_config
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig
from trial_core.errors import CheckpointDamaged, CheckpointNotFound

pytestmark = [pytest.mark.slots, pytest.mark.server]


@pytest.fixture
def here(
    prefect_server: PrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A folder that runs keep everything in, while flows of this process use the real server."""
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path / "home"))
    with prefect_server.configured():
        yield tmp_path


def train(config: Any) -> Any:
    from trialflow.flows.train import train as flow

    return flow(config)


def experiment(here: Path, slots: int, name: str, **searcher: Any) -> ExperimentConfig:
    """A run of 4 batches that validates before the first, and records below `name`."""
    (here / name).mkdir()
    return toy_config(
        here, 4, name=name, resources={"slots_per_trial": slots}, perform_initial_validation=True,
        searcher={"metric": "loss", "max_length": {"batches": 4}, **searcher},
        hyperparameters={"record": str(here / name), "zero_stage": 3},
    )  # fmt: skip


def told(here: Path, name: str, hook: str) -> list[dict[str, Any]]:
    return [line for line in lines(here / name, "hooks", 0) if line["hook"] == hook]


def test_a_new_trial_starts_from_anothers_checkpoint(here: Path) -> None:
    """At batch 0, with the source's weights, as its own first validation shows; on a retry of the
    trial's own it is its own checkpoint that counts."""
    source = train(experiment(here, 1, "source"))
    config = experiment(here, 1, "own", source_checkpoint_uuid=source.checkpoint_uuid[:8])
    result = train(config)

    (started,) = told(here, "own", "on_trial_startup")
    assert (started["first"], started["uuid"]) == (0, source.checkpoint_uuid)
    first, _ = told(here, "own", "on_validation_end")
    assert first["metrics"] == source.validation_metrics
    assert [line[0] for line in lines(here / "own", "samples", 0)] == [0, 1, 2, 3]
    assert result.trial != source.trial

    from trialflow.flows.train import train as flow

    flow(config, result.trial)
    assert told(here, "own", "on_trial_startup")[-1]["uuid"] == result.checkpoint_uuid


@pytest.mark.long
def test_a_trial_starts_on_any_number_of_slots(here: Path) -> None:
    """Under ZeRO-3, what one slot has saved on two: the same validation, with the optimizer's state
    as with the weights alone."""
    source = train(experiment(here, 1, "source"))
    uuid = source.checkpoint_uuid
    for name, weights_only in (("weights", True), ("state", False)):
        train(
            experiment(here, 2, name, source_checkpoint_uuid=uuid, source_weights_only=weights_only)
        )
        first, _ = told(here, name, "on_validation_end")
        expected = pytest.approx(source.validation_metrics["loss"], rel=1e-5)
        assert first["metrics"]["loss"] == expected


def test_a_source_that_cannot_be_used(here: Path) -> None:
    """One that is not there, and one that is damaged: the file is named, nothing is trained."""
    with pytest.raises(CheckpointNotFound, match=r"no checkpoint in file://.* begins with 'abcd'"):
        train(experiment(here, 1, "missing", source_checkpoint_uuid="abcd"))
    source = train(experiment(here, 1, "source"))
    config = experiment(here, 1, "own", source_checkpoint_uuid=source.checkpoint_uuid)
    store = CheckpointStore(config.checkpoint_storage.url)
    folder = here / "checkpoints" / "checkpoints" / source.checkpoint_uuid
    entry = max(store.open(source.checkpoint_uuid).files, key=lambda file: file.size_bytes)
    (folder / entry.path).unlink()
    with pytest.raises(CheckpointDamaged, match=f"source_checkpoint_uuid: .*{entry.path}"):
        train(config)
    assert lines(here / "own", "samples", 0) == []
