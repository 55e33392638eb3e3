"""Fits a small PyTorchTrial that tests watch and disturb: ``fit_watched.py OPTIONS``.

OPTIONS is a JSON object: ``folder`` for its files, ``batches``, ``latest`` (what to resume from),
``exp_conf`` (more of the experiment), and ``do`` + ``rank``: what that rank does in batch 5.

Each rank appends the index of a batch to ``batches-N``, and writes how `fit` has ended to
``ended-N.json``: its result, or the class and text of its error.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.utils.data import TensorDataset

from trial_core import pytorch
from trial_core.pytorch import Batch, DataLoader

DISTURBED_BATCH = 5
BATCH_SECONDS = 0.02


class UsersError(Exception):
    """An error of the user's code."""


class Shutdown(pytorch.PyTorchCallback):
    """Tells of the end of a trial."""

    def __init__(self, folder: str) -> None:
        self.path = Path(folder, f"shut-down-{os.environ.get('RANK', '0')}")

    def on_trial_shutdown(self) -> None:
        self.path.touch()


class Watched(pytorch.PyTorchTrial):
    """A line, whose gradients the ranks exchange in each batch."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.options = context.get_hparams()
        self.rank = context.distributed.get_rank()
        self.model = context.wrap_model(nn.Linear(1, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.01))

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        if (batch_idx, self.rank) == (DISTURBED_BATCH, self.options.get("rank")):
            self._disturb(self.options["do"])
        time.sleep(BATCH_SECONDS)
        loss = (self.model(batch[0]) - 2).square().mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        with Path(self.options["folder"], f"batches-{self.rank}").open("a") as file:
            file.write(f"{batch_idx}\n")
        return {"loss": loss}

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"shutdown": Shutdown(self.options["folder"])}

    def _disturb(self, what: str) -> None:
        if what == "raise":
            raise UsersError("of the trial")
        if what == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        if what == "kill driver":
            for child in psutil.Process().children():
                if "driver" in " ".join(child.cmdline()):
                    child.kill()
        if what == "sleep":
            time.sleep(3600)

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"loss": (self.model(batch[0]) - 2).square().mean()}

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.arange(8.0).unsqueeze(1)), batch_size=2)

    def build_validation_data_loader(self) -> DataLoader:
        return self.build_training_data_loader()


def fit(options: dict[str, Any]) -> dict[str, Any]:
    """Fit; the result."""
    experiment = {
        "name": "watched", "searcher": {"metric": "loss"}, "tensorboard_logging": False,
        "checkpoint_storage": f"file://{options['folder']}/checkpoints",
        **options.get("exp_conf", {}),
    }  # fmt: skip
    with pytorch.init(hparams=options, exp_conf=experiment) as context:
        result = pytorch.Trainer(Watched(context), context).fit(
            max_length=Batch(options["batches"]),
            reporting_period=Batch(options["batches"]),
            latest_checkpoint=options.get("latest"),
        )
        return asdict(result)


def main(options: dict[str, Any]) -> None:
    """Fit, and write how that has ended."""
    ended: dict[str, Any] = {}
    try:
        ended = fit(options)
    except BaseException as error:
        ended = {"error": type(error).__name__, "text": str(error)}
        raise
    finally:
        path = Path(options["folder"], f"ended-{os.environ.get('RANK', '0')}.json")
        path.write_text(json.dumps(ended))


if __name__ == "__main__":
    main(json.loads(sys.argv[-1]))
