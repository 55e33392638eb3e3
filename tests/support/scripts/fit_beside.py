"""A script with uploads beside training: ``fit_beside.py FOLDER``, on two ranks.

Three fits, one after the other. Rank N writes each fit's result to FOLDER:

- ``beside-N.json``: 10 batches, saved at 5. Rank 1 does not train batch 7 before that checkpoint
  is committed;
- ``rest-N.json``: resumes from it and trains up to batch 13;
- ``refused-N.json``: rank 1 saves a file whose name no storage accepts.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).parents[1]
sys.path.insert(0, str(SUPPORT / "toy"))
sys.path.insert(0, str(SUPPORT / "toy_context"))

from context_trials import Measuring  # noqa: E402

from trial_core.deepspeed import DeepSpeedTrialContext, Trainer, init  # noqa: E402
from trial_core.errors import TrialflowError  # noqa: E402
from trial_core.pytorch import Batch  # noqa: E402

COMMITTED_WITHIN_SECONDS = 60


class Beside(Measuring):
    """Hyperparameters: commit_by (a batch), manifests (a folder), odd_name (of a file)."""

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        rank = self.context.distributed.get_rank()
        if rank == 1 and batch_idx == self.hparams.get("commit_by"):
            deadline = time.monotonic() + COMMITTED_WITHIN_SECONDS
            while not list(Path(self.hparams["manifests"]).glob("*/*.json")):
                if time.monotonic() > deadline:
                    raise RuntimeError("the checkpoint was not committed beside the workload")
                time.sleep(0.01)
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)

    def save(self, context: DeepSpeedTrialContext, path: Path) -> None:
        super().save(context, path)
        if context.distributed.get_rank() == 1 and "odd_name" in self.hparams:
            (path / self.hparams["odd_name"]).touch()


def fit(folder: Path, name: str, fit: dict[str, Any], **hparams: Any) -> dict[str, Any]:
    """Fit, and write the result to `folder`."""
    exp_conf = {"name": name, "checkpoint_storage": f"file://{folder}/checkpoints"}
    with init(hparams=hparams, exp_conf=exp_conf) as context:
        rank = context.distributed.get_rank()
        try:
            outcome = asdict(Trainer(Beside(context), context).fit(**fit))
        except TrialflowError as error:
            outcome = {"error": f"{type(error).__name__}: {error}"}
        (folder / f"{name}-{rank}.json").write_text(json.dumps(outcome))
    return outcome


def main(folder: Path) -> None:
    """Run the three fits."""
    saved = fit(
        folder, "beside", {"max_length": Batch(10), "checkpoint_period": Batch(5)},
        commit_by=7, manifests=f"{folder}/checkpoints/manifests",
    )  # fmt: skip
    fit(
        folder, "rest",
        {"max_length": Batch(13), "latest_checkpoint": saved["checkpoint_uuid"]},
    )  # fmt: skip
    fit(folder, "refused", {"max_length": Batch(2)}, odd_name="two\nlines")


if __name__ == "__main__":
    main(Path(sys.argv[-1]))
