"""What is refused of changed arguments of Hugging Face's Trainer. What it makes of the others is
measured in tests/resuming/test_hugging_face.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from trial_core.errors import CheckpointError
from trial_core.messages import RestoredSettings
from trial_core.rank.core_api.trainer_arguments import (
    FILE,
    TrainerRecord,
    changes,
    require_same_place,
    require_same_types,
)
from trial_core.rank.state_files.built_settings import read_resume_file


def record(
    samples: int = 4, ranks: int = 1, optimizer: str | None = "torch.AdamW"
) -> TrainerRecord:
    """Of an epoch of 80 samples."""
    step = samples * ranks
    return TrainerRecord({}, optimizer, samples, step, epoch_steps=80 // step)


def arguments(**given: bool) -> SimpleNamespace:
    return SimpleNamespace(**{"ignore_data_skip": False, "auto_find_batch_size": False, **given})


@pytest.mark.parametrize(
    ("then", "now", "step", "lost"),
    [
        (record(4), record(2), 10, "20 samples of the epoch come twice"),
        (record(4), record(8), 25, "20 samples of the epoch are left out"),
        (record(4), record(8), 20, None),  # an epoch has ended, in both sizes
        (record(4), record(2), 20, "40 samples of the epoch are left out"),
        (record(4), record(2, ranks=2), 10, None),  # as many samples a step
    ],
)
def test_a_batch_that_loses_samples_is_refused(
    then: TrainerRecord, now: TrainerRecord, step: int, lost: str | None
) -> None:
    """The Trainer would skip as many steps of the new size as it had trained of the old one."""
    if lost is None:
        require_same_place(then, now, arguments(), step)
        return
    with pytest.raises(CheckpointError, match=f"{lost}.*Resume with 4 samples a step; or train"):
        require_same_place(then, now, arguments(), step)
    require_same_place(then, now, arguments(ignore_data_skip=True), step)


def test_other_slots_are_told_and_not_refused() -> None:
    """A run may be moved to more or fewer of them."""
    then, now = record(4), record(4, ranks=2)
    require_same_place(then, now, arguments(), 5)
    told = changes(then, now, arguments(), 5, None, None)
    lost = "20 samples of the epoch are left out"
    assert told == RestoredSettings(new=[f"Trainer: samples of a step 4 -> 8, and {lost}"])


def test_another_class_of_optimizer_is_refused_by_name() -> None:
    """Not where the script does not say which one it builds."""
    with pytest.raises(CheckpointError, match=r"was torch.AdamW .* and is torch.SGD now"):
        require_same_types(record(), record(optimizer="torch.SGD"))
    require_same_types(record(), record(optimizer=None))


def test_a_record_is_what_was_written(tmp_path: Path) -> None:
    """A checkpoint without one is not compared, and a damaged one is named."""
    assert read_resume_file(tmp_path, TrainerRecord) is None
    record().write(tmp_path)
    assert read_resume_file(tmp_path, TrainerRecord) == record()
    (tmp_path / FILE).write_text('{"arguments": 1}')
    with pytest.raises(CheckpointError, match=f"the checkpoint's {FILE} is not trialflow's"):
        read_resume_file(tmp_path, TrainerRecord)
