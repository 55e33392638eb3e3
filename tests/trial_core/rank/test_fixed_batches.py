"""Training data of which each rank takes batches of a fixed size, on another number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.slots import drive, toy_config
from trial_core.errors import RankFailed
from trial_core.processes.slots.slot_group import SlotGroup


@pytest.mark.slots
def test_fixed_batches_are_refused_or_warned_of(
    warm_slots: Callable[[int], SlotGroup], tmp_path: Path
) -> None:
    """Samples would be left out: also for a run that moves to fewer slots, unchanged. Warned of, if
    the loader does not tell the size."""
    for sampled in (True, False):
        config = toy_config(
            tmp_path, 4, entrypoint="settings_trials:FixedBatches", scheduling_unit=2,
            min_checkpoint_period={"batches": 2}, hyperparameters={"sampled": sampled},
        )  # fmt: skip
        first = drive(warm_slots(2), config, tmp_path, persist=True)
        assert first.warnings == []
        if sampled:
            rest = drive(warm_slots(1), config, tmp_path, resume=first, compares=False)
            assert "counted on 2 data-parallel ranks, and the run now has 1" in rest.warnings[0]
        else:
            with pytest.raises(RankFailed, match=r"a batch had 4 samples .* has 2 now"):
                drive(warm_slots(1), config, tmp_path, resume=first, compares=False)
