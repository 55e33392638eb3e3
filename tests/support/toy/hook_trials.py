"""Toy trials that log, on every rank, the calls of their methods and callbacks in order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from parallel_trials import TensorParallelTrial
from toy_trial import ToyTrial

from trial_core.deepspeed import DeepSpeedTrial, DeepSpeedTrialContext
from trial_core.pytorch import DataLoader, PyTorchCallback


def plain(value: Any) -> Any:
    """A NumPy number or array that a callback gets, for JSON."""
    return value.tolist()


class CallLog:
    """One rank's log: a line for each call, with its name and arguments."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        self.rank = context.distributed.get_rank()
        self.is_last_rank = self.rank == context.distributed.get_size() - 1
        self._path = Path(context.get_hparam("record")) / f"calls-{self.rank}.jsonl"

    def add(self, call: str, **details: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"call": call, **details}, default=plain) + "\n")


class EveryHook(PyTorchCallback):
    """Overrides every hook. Requests a stop in hook `stop_in`, on the last rank."""

    def __init__(self, log: CallLog, name: str, stop_in: str | None = None) -> None:
        self.log = log
        self.name = name
        self.stop_in = stop_in
        self.ended: list[int] = []

    def _log(self, call: str, **details: Any) -> None:
        self.log.add(call, callback=self.name, **details)
        if call == self.stop_in and self.log.is_last_rank:
            self.log.context.set_stop_requested(True)

    def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        self._log("on_trial_startup", first=first_batch_idx, uuid=checkpoint_uuid)

    def on_checkpoint_load_start(self, checkpoint: dict[str, Any]) -> None:
        self._log("on_checkpoint_load_start", keys=sorted(checkpoint), added=checkpoint["added"])
        checkpoint["callbacks"][self.name]["changed"] = True

    def on_training_start(self) -> None:
        self._log("on_training_start")

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        self._log("on_training_epoch_start", epoch=epoch_idx)

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        self.ended.append(epoch_idx)
        self._log("on_training_epoch_end", epoch=epoch_idx)

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: Any) -> None:
        self._log("on_training_workload_end", average=avg_metrics, batches=batch_metrics)

    def on_validation_start(self) -> None:
        self._log("on_validation_start")

    def on_validation_epoch_start(self) -> None:
        self._log("on_validation_epoch_start")

    def on_validation_epoch_end(self, outputs: list[Any]) -> None:
        self._log("on_validation_epoch_end", outputs=outputs)

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self._log("on_validation_end", metrics=metrics)

    def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
        self._log("on_checkpoint_save_start", keys=sorted(checkpoint))
        checkpoint.setdefault("added", []).append([self.name, self.log.rank])

    def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
        self._log("on_checkpoint_write_end", **_contents(checkpoint_dir))

    def on_checkpoint_end(self, checkpoint_dir: str) -> None:
        self._log("on_checkpoint_end", **_contents(checkpoint_dir))

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        self._log("on_checkpoint_upload_end", uuid=uuid)

    def on_trial_shutdown(self) -> None:
        self._log("on_trial_shutdown")

    def state_dict(self) -> dict[str, Any]:
        self._log("state_dict")
        return {"name": self.name, "rank": self.log.rank, "ended": self.ended}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._log("load_state_dict", state=state_dict)
        self.ended = state_dict["ended"]


def _contents(folder: str) -> dict[str, Any]:
    found = (path for path in Path(folder).rglob("*") if path.is_file())
    return {"folder": folder, "files": sorted(str(path.relative_to(folder)) for path in found)}


class LogsCalls(ToyTrial):
    """Logs its own calls between those of its callbacks.

    Hyperparameters: callbacks (their names), and stop_in (see `EveryHook`).
    """

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        self.log = CallLog(context)
        self.indices = context.wrap_reducer(sorted, name="indices", for_training=False)

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        self.log.add("train_batch", batch=batch_idx, epoch=epoch_idx)
        metrics = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
        return {**metrics, "batch": float(batch_idx)}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        self.log.add("evaluate_batch", batch=batch_idx)
        inputs, index = self.context.to_device(next(dataloader_iter))
        self._update(index)
        return {"loss": self._loss(inputs, index), "mean_index": index.mean()}

    def _update(self, index: torch.Tensor) -> None:
        for one in index.flatten().tolist():
            self.indices.update(one)

    def build_training_data_loader(self) -> DataLoader:
        self.log.add("build_training_data_loader")
        return super().build_training_data_loader()

    def build_validation_data_loader(self) -> DataLoader:
        self.log.add("build_validation_data_loader")
        return super().build_validation_data_loader()

    def save(self, context: DeepSpeedTrialContext, path: Path) -> None:
        self.log.add("save")
        super().save(context, path)

    def load(self, context: DeepSpeedTrialContext, load_path: Path) -> None:
        self.log.add("load")
        super().load(context, load_path)

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        names = self.hparams.get("callbacks", ["only"])
        return {name: EveryHook(self.log, name, self.hparams.get("stop_in")) for name in names}


class FullDataset(LogsCalls):
    """Validates the whole set at once."""

    evaluate_batch = DeepSpeedTrial.evaluate_batch  # as if it had never been defined

    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        self.log.add("evaluate_full_dataset")
        batches = list(data_loader)
        inputs, index = (torch.cat(parts) for parts in zip(*batches, strict=True))
        self._update(index)
        return {"loss": self._loss(inputs, index)}


class Silent(TensorParallelTrial):
    """Half of the ranks neither load data nor report metrics."""

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"only": EveryHook(CallLog(self.context), "only")}


class Positions(PyTorchCallback):
    """Logs the current batch in hooks. Its `on_training_epoch_start` has no parameter."""

    def __init__(self, log: CallLog) -> None:
        self.log = log

    def _log(self, call: str) -> None:
        self.log.add(call, batch=self.log.context.current_train_batch())

    def on_training_start(self) -> None:
        self._log("on_training_start")

    def on_training_epoch_start(self) -> None:  # type: ignore[override]  # the older form
        self._log("on_training_epoch_start")

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: Any) -> None:
        self._log("on_training_workload_end")

    def on_validation_start(self) -> None:
        self._log("on_validation_start")


class LogsPositions(ToyTrial):
    """Logs where hooks see the training."""

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"positions": Positions(CallLog(self.context))}
