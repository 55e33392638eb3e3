"""The whole story of a short run, call by call: what is drawn in `PyTorchCallback`, spelt out.

Of the trial `Told` (tests/support/toy/hook_trials.py): a micro-batch is 2 samples, a batch 2
micro-batches a rank, an epoch 3.5 batches. Mutually prime periods: a workload ends after 5 batches
at most, a validation is due every 3, a checkpoint every 4.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.slots import lines

WORKLOAD, VALIDATION, CHECKPOINT = 5, 3, 4
FRESH_BATCHES, RESUMED_BATCHES = 6, 10

UPLOAD_END = "on_checkpoint_upload_end"

FRESH = """
    on_trial_startup 0
    build_training_data_loader
    build_validation_data_loader
    on_training_start

    on_validation_start
    on_validation_epoch_start
        evaluate_batch 0
        evaluate_batch 1
    on_validation_epoch_end
    on_validation_end

    on_training_epoch_start 0
        train_batch 0
        train_batch 0
        train_batch 1
        train_batch 1
        train_batch 2
        train_batch 2
    on_training_workload_end

    on_validation_start
    on_validation_epoch_start
        evaluate_batch 0
        evaluate_batch 1
    on_validation_epoch_end
    on_validation_end

        train_batch 3
        train_batch 3
    on_training_epoch_end 0
    on_training_workload_end

    state_dict
    on_checkpoint_save_start
        save
    on_checkpoint_write_end
    on_checkpoint_end
    on_checkpoint_upload_end

    on_training_epoch_start 1
        train_batch 4
        train_batch 4
    on_training_workload_end

        train_batch 5
        train_batch 5
    on_training_workload_end

    on_validation_start
    on_validation_epoch_start
        evaluate_batch 0
        evaluate_batch 1
    on_validation_epoch_end
    on_validation_end

    state_dict
    on_checkpoint_save_start
        save
    on_checkpoint_write_end
    on_checkpoint_end
    on_checkpoint_upload_end

    on_trial_shutdown
"""

RESUMED = """
    on_trial_startup 6
    build_training_data_loader
    build_validation_data_loader
    on_checkpoint_load_start
        load
    load_state_dict
    on_training_start

        train_batch 6
        train_batch 6
    on_training_epoch_end 1
    on_training_epoch_start 2
        train_batch 7
        train_batch 7
    on_training_workload_end

    state_dict
    on_checkpoint_save_start
        save
    on_checkpoint_write_end
    on_checkpoint_end
    on_checkpoint_upload_end

        train_batch 8
        train_batch 8
    on_training_workload_end

    on_validation_start
    on_validation_epoch_start
        evaluate_batch 0
        evaluate_batch 1
    on_validation_epoch_end
    on_validation_end

        train_batch 9
        train_batch 9
    on_training_workload_end

    on_validation_start
    on_validation_epoch_start
        evaluate_batch 0
        evaluate_batch 1
    on_validation_epoch_end
    on_validation_end

    state_dict
    on_checkpoint_save_start
        save
    on_checkpoint_write_end
    on_checkpoint_end
    on_checkpoint_upload_end

    on_trial_shutdown
"""


def hparams(ranks: int, record: Path, **more: Any) -> dict[str, Any]:
    """The trial's hyperparameters: the same number of micro-batches a rank, however many ranks."""
    record.mkdir(parents=True, exist_ok=True)
    return {
        "micro_batch_size": 2, "accumulation": 2, "train_samples": 14 * ranks,
        "validation_samples": 4 * ranks, "record": str(record), **more,
    }  # fmt: skip


def told(record: Path, rank: int, call: str | None = None) -> list[dict[str, Any]]:
    """What a rank has told: everything, or each `call`."""
    seen: list[dict[str, Any]] = lines(record, "story", rank)
    return [line for line in seen if call in (None, line["call"])]


def calls(record: Path, rank: int) -> list[str]:
    """A rank's story in the words of `FRESH` and `RESUMED`."""
    numbers = {"on_trial_startup": "first", "train_batch": "batch", "evaluate_batch": "batch"}
    numbers |= dict.fromkeys(("on_training_epoch_start", "on_training_epoch_end"), "epoch")
    return [
        f"{line['call']} {line[numbers[line['call']]]}" if line["call"] in numbers else line["call"]
        for line in told(record, rank)
    ]


def spelt(story: str) -> list[str]:
    """The calls of `FRESH` or `RESUMED`."""
    return [line.strip() for line in story.splitlines() if line.strip()]


def without_uploads(story: list[str]) -> list[str]:
    """`story` without the hook that has no place of its own, where uploads run beside training."""
    return [call for call in story if call != UPLOAD_END]


def assert_uploads_end_in_time(story: list[str]) -> None:
    """Every upload's hook runs after its checkpoint is written, before the next or the end."""
    places = ("on_checkpoint_end", UPLOAD_END, "state_dict", "on_trial_shutdown")
    order = [call for call in story if call in places]
    saved = order.count("on_checkpoint_end")
    assert order == ["state_dict", "on_checkpoint_end", UPLOAD_END] * saved + ["on_trial_shutdown"]
