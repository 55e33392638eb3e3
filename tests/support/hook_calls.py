"""Every call that a short run makes of the trial `LogsCalls` and its callbacks, in order.

In tests/support/toy/hook_trials.py. A micro-batch is 2 samples, a batch 2 micro-batches per rank,
an epoch 3.5 batches. The periods are mutually prime: a train-workload has at most 5 batches, a
validation is due every 3, a checkpoint every 4.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.slots import lines

WORKLOAD, VALIDATION, CHECKPOINT = 5, 3, 4
FRESH_BATCHES, RESUMED_BATCHES = 6, 10

UPLOAD_END = "on_checkpoint_upload_end"
WORKLOAD_END = "on_training_workload_end"


def train(*batches: int) -> list[str]:
    """The calls of train_batch, one per micro-batch."""
    return [f"train_batch {batch}" for batch in batches for _ in range(2)]


LOADERS = ["build_training_data_loader", "build_validation_data_loader"]
VALIDATE = [
    "on_validation_start", "on_validation_epoch_start", "evaluate_batch 0", "evaluate_batch 1",
    "on_validation_epoch_end", "on_validation_end",
]  # fmt: skip
SAVE = [
    "state_dict", "on_checkpoint_save_start", "save", "on_checkpoint_write_end",
    "on_checkpoint_end", UPLOAD_END,
]  # fmt: skip

FRESH = [
    "on_trial_startup 0", *LOADERS, "on_training_start",
    *VALIDATE,
    "on_training_epoch_start 0", *train(0, 1, 2), WORKLOAD_END,
    *VALIDATE,
    *train(3), "on_training_epoch_end 0", WORKLOAD_END,
    *SAVE,
    "on_training_epoch_start 1", *train(4), WORKLOAD_END,
    *train(5), WORKLOAD_END,
    *VALIDATE,
    *SAVE,
    "on_trial_shutdown",
]  # fmt: skip

RESUMED = [
    "on_trial_startup 6", *LOADERS, "on_checkpoint_load_start", "load", "load_state_dict",
    "on_training_start",
    *train(6), "on_training_epoch_end 1", "on_training_epoch_start 2", *train(7), WORKLOAD_END,
    *SAVE,
    *train(8), WORKLOAD_END,
    *VALIDATE,
    *train(9), WORKLOAD_END,
    *VALIDATE,
    *SAVE,
    "on_trial_shutdown",
]  # fmt: skip


def hparams(ranks: int, record: Path, **more: Any) -> dict[str, Any]:
    """The trial's hyperparameters: the same number of micro-batches per rank on any `ranks`."""
    record.mkdir(parents=True, exist_ok=True)
    return {
        "micro_batch_size": 2, "accumulation": 2, "train_samples": 14 * ranks,
        "validation_samples": 4 * ranks, "record": str(record), **more,
    }  # fmt: skip


def logged(record: Path, rank: int, call: str | None = None) -> list[dict[str, Any]]:
    """The logged calls of a rank with their arguments: all, or every `call`."""
    seen: list[dict[str, Any]] = lines(record, "calls", rank)
    return [line for line in seen if call in (None, line["call"])]


def calls(record: Path, rank: int) -> list[str]:
    """The logged calls of a rank, in the form of `FRESH` and `RESUMED`."""
    numbers = {"on_trial_startup": "first", "train_batch": "batch", "evaluate_batch": "batch"}
    numbers |= dict.fromkeys(("on_training_epoch_start", "on_training_epoch_end"), "epoch")
    return [
        f"{line['call']} {line[numbers[line['call']]]}" if line["call"] in numbers else line["call"]
        for line in logged(record, rank)
    ]


def assert_calls(seen: list[str], expected: list[str]) -> None:
    """Check all calls. An upload beside training may end anywhere before the next save."""
    assert [call for call in seen if call != UPLOAD_END] == [
        call for call in expected if call != UPLOAD_END
    ]
    places = ("on_checkpoint_end", UPLOAD_END, "state_dict", "on_trial_shutdown")
    order = [call for call in seen if call in places]
    saves = order.count("on_checkpoint_end")
    assert order == ["state_dict", "on_checkpoint_end", UPLOAD_END] * saves + ["on_trial_shutdown"]
