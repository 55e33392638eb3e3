"""The trials of `benchmarks.stopping` and `benchmarks.restart`, which record when they train.

``python -m benchmarks.stopping_trial MODEL`` starts the same model without trialflow, in one rank.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed

from benchmarks.models import MODELS
from benchmarks.trial import BareLoop, LoopTrial, new_engine
from trial_core.deepspeed import DeepSpeedTrialContext
from trial_core.deepspeed.op_builds import prepare_op_builds
from trial_core.pytorch import DataLoader


class TimestampTrial(LoopTrial):
    """Writes one line per trained batch: seconds since the epoch.

    Hyperparameters: as `LoopTrial`; record (rank 0's file); waits (true: it creates the file,
    then loads data for ever instead of training).
    """

    def build_training_data_loader(self) -> DataLoader:
        if self.context.get_hparam("waits"):
            Path(self.context.get_hparam("record")).touch()
            time.sleep(3600)
        return super().build_training_data_loader()

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        metrics = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
        if self.context.distributed.get_rank() == 0:
            with Path(self.context.get_hparam("record")).open("a") as file:
                file.write(f"{time.time()}\n")
        return metrics


class RestartedTrial(TimestampTrial):
    """Ends after its first batch if it was built before, by ranks that have trained."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        self.is_restarted = Path(context.get_hparam("record")).exists()

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        metrics = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
        self.context.set_stop_requested(self.is_restarted)
        return metrics


def main() -> None:
    """Build a model and an engine, and train a batch; rank 0 prints the time."""
    model = MODELS[sys.argv[1]]
    prepare_op_builds()
    deepspeed.init_distributed(verbose=False)
    BareLoop(new_engine(model(), model.micro_batch_size), model).run(1)
    if os.environ["RANK"] == "0":
        print(time.time(), flush=True)
    os._exit(0)  # gloo may abort if the other rank has ended


if __name__ == "__main__":
    main()
