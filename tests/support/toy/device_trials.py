"""The toy trial on a fake accelerator that counts, see `tests/support/fake_accelerator.py`."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import deepspeed
import torch
from toy_trial import ToyTrial

from trial_core.deepspeed import DeepSpeedTrialContext
from trial_core.pytorch import PyTorchCallback

sys.path.append(str(Path(__file__).parents[3]))
from tests.support.fake_accelerator import Memory, fake_accelerator

LAYERS = 8
WIDTH = 64
LAYER_BYTES = 4 * (WIDTH + 1) * WIDTH


class Meter(PyTorchCallback):
    """Measures snapshots and restores of the state; leaves the fake when the trial ends."""

    def __init__(self, trial: DeviceTrial) -> None:
        self.trial = trial
        self.measured = ExitStack()

    def on_checkpoint_save_start(self, state: dict[str, Any]) -> None:
        self.measured.enter_context(self.trial.measured("save"))

    def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
        self.measured.close()

    def on_checkpoint_load_start(self, state: dict[str, Any]) -> None:
        self.measured.enter_context(self.trial.measured("restore"))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.measured.close()

    def on_trial_shutdown(self) -> None:
        self.measured.close()
        self.trial.accelerator.close()


class DeviceTrial(ToyTrial):
    """A deeper model. Hyperparameters: zero_stage; device: whether to use the fake."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        self.hparams = {"zero_stage": 1, "device": True, **context.get_hparams()}
        self.hparams.update(
            micro_batch_size=2, train_samples=64, validation_samples=12, shuffle=True
        )
        self.record = None
        self.accelerator = ExitStack()
        self.fake = None
        if self.hparams["device"]:
            self.fake = self.accelerator.enter_context(fake_accelerator())
        model = torch.nn.Sequential(
            torch.nn.Linear(2, WIDTH),
            *(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)),
        )
        self.engine = context.wrap_model_engine(
            deepspeed.initialize(
                model=model,
                model_parameters=model.parameters(),
                config={
                    "train_micro_batch_size_per_gpu": 2,
                    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
                    "zero_optimization": {
                        "stage": self.hparams["zero_stage"],
                        "stage3_param_persistence_threshold": 0,
                    },
                },
            )[0]
        )

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        pinned = draws = 0
        if self.fake is not None:
            self.fake.rng = self.fake.rng + 1
            pinned, draws = self.fake.pinned_bytes, int(self.fake.rng)
        metrics = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
        return {**metrics, "pinned": pinned, "draws": draws}

    def load_weights(self, context: DeepSpeedTrialContext, load_path: Path) -> None:
        with self.measured("weights"):
            super().load_weights(context, load_path)

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"meter": Meter(self)} if self.fake else {}

    def measured(self, what: str) -> _Measured:
        return _Measured(self, what)


class _Measured(Memory):
    """Writes to the trial's folder what the block took: `{what}-{rank}.json`."""

    def __init__(self, trial: DeviceTrial, what: str) -> None:
        super().__init__()
        name = f"{what}-{trial.context.distributed.get_rank()}.json"
        self.trial, self.file = trial, Path(trial.hparams["measures"]) / name

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        assert self.trial.fake is not None
        pinned = self.trial.fake.pinned_bytes
        self.file.write_text(json.dumps({"peak": self.peak_bytes, "pinned": pinned}))
