"""The names of validation metrics, which ranks find before training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.slots import Driven, drive, lines, toy_config
from tests.support.tensors import differing, tensors
from tests.trial_core.trainer.fits import files, hooks
from trial_core.processes.slots.slot_group import SlotGroup

pytestmark = pytest.mark.slots
Warm = Callable[[int], SlotGroup]


def run(slots: SlotGroup, folder: Path, trial: str, names_metrics: bool, **hparams: Any) -> Driven:
    """Train 4 batches, and validate after 2 and 4."""
    config = toy_config(
        folder, 4, entrypoint=trial, min_validation_period={"batches": 2},
        hyperparameters={"record": str(folder), "records_validations": False, **hparams},
    )  # fmt: skip
    return drive(slots, config, folder, persist=True, names_metrics=names_metrics)


@pytest.mark.parametrize(
    ("trial", "hparams"),
    [
        ("evaluation_trials:DrawingAlone", {"validation_samples": 14, "zero_stage": 3}),
        pytest.param(
            "evaluation_trials:DrawingAlone", {"validation_samples": 14}, marks=pytest.mark.long
        ),
        pytest.param("toy_trial:ToyTrial", {"zero_stage": 2}, marks=pytest.mark.long),
        pytest.param(
            "parallel_trials:PipelineTrial", {"accumulation": 2, "train_samples": 50},
            marks=pytest.mark.long,
        ),
    ],
)  # fmt: skip
def test_training_does_not_notice(
    warm_slots: Warm, tmp_path: Path, trial: str, hparams: dict[str, Any]
) -> None:
    """Data, metrics, hooks, weights and random state are those of a run without it.

    Its evaluation draws random numbers, and one shard is shorter than the other.
    """
    slots, with_names, without = warm_slots(2), tmp_path / "with", tmp_path / "without"
    for folder in (with_names, without):
        folder.mkdir()
    named = run(slots, with_names, trial, True, **hparams)
    plain = run(slots, without, trial, False, **hparams)
    assert named.metric_names == sorted(named.validation[0])
    assert (named.training, named.validation) == (plain.training, plain.validation)
    assert [each["hook"] for each in hooks(with_names)] == [each["hook"] for each in hooks(without)]
    for rank in (0, 1):
        assert lines(with_names, "samples", rank) == lines(without, "samples", rank)
    expected = tensors(files(without, plain.checkpoints[-1]))
    assert len(expected) > 5
    assert differing(expected, tensors(files(with_names, named.checkpoints[-1]))) == []


@pytest.mark.parametrize(
    ("trial", "names"),
    [
        ("evaluation_trials:NamedReducer", ["indices", "loss"]),
        ("evaluation_trials:Indices", None),
        ("evaluation_trials:FullDataset", None),
        ("evaluation_trials:ReadOnce", None),
        ("evaluation_trials:Prepared", None),
    ],
    ids=[
        "a reducer with a name", "a reducer without", "the whole set", "a loader of one pass",
        "a callback that prepares the validation",
    ],
)  # fmt: skip
def test_the_names_that_one_batch_tells(
    warm_slots: Warm, tmp_path: Path, trial: str, names: list[str] | None
) -> None:
    """Where it cannot tell, nothing is evaluated, and the names are left open."""
    config = toy_config(tmp_path, 1, entrypoint=trial)
    found = drive(warm_slots(2), config, tmp_path, names_metrics=True)
    assert found.metric_names == names
    assert found.validation[0]["indices"] == list(range(12))
