"""The digits example: one problem, solved by both kinds of trial."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.slots import drive
from trial_core.config import load_config
from trial_core.processes.slots.slot_group import SlotGroup

DIGITS = Path(__file__).parents[2] / "examples" / "digits"
pytestmark = pytest.mark.slots


def accuracies(
    slots: SlotGroup, folder: Path, kind: str, *changes: str
) -> tuple[list[float], list[float]]:
    """Accuracies and losses of the example's validations, in their order."""
    pytest.importorskip("sklearn", reason="this example reads data of scikit-learn")
    storage = f"checkpoint_storage=file://{folder}/checkpoints"
    # The shared ranks work in the folder of the toys, which has a module with this class.
    entrypoint = f"entrypoint=example_trials:digits_{kind}.DigitsTrial"
    config = load_config(DIGITS / f"{kind}.yaml", [storage, entrypoint, *changes])
    metrics = drive(slots, config, folder).validation
    return [each["accuracy"] for each in metrics], [each["validation_loss"] for each in metrics]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["pytorch", "deepspeed"])
def test_an_example_of_digits_learns(
    warm_slots: Callable[[int], SlotGroup], tmp_path: Path, kind: str
) -> None:
    """Its validation loss falls within a few batches."""
    changes = ("searcher.max_length={batches: 12}", "min_validation_period={batches: 4}")
    seen, losses = accuracies(warm_slots(2), tmp_path, kind, *changes)
    assert len(seen) == 3
    assert losses[-1] < losses[0]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["pytorch", "deepspeed"])
def test_both_kinds_of_trial_recognise_97_of_100_digits(
    warm_slots: Callable[[int], SlotGroup], tmp_path: Path, kind: str
) -> None:
    """As their YAML says, at the end of training."""
    seen, _ = accuracies(warm_slots(2), tmp_path, kind)
    assert seen[-1] >= 0.97
