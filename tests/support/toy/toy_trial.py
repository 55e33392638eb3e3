"""A trial that runs in a second, with hyperparameters for what a test needs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import deepspeed
import psutil
import torch
from torch.utils.data import TensorDataset

from trial_core.deepspeed import DeepSpeedTrial, DeepSpeedTrialContext
from trial_core.pytorch import DataLoader, PyTorchCallback


def samples(count: int) -> TensorDataset:
    """Samples with their index, so that a test can identify them."""
    index = torch.arange(count, dtype=torch.float32).unsqueeze(1)
    return TensorDataset(torch.cat([index / count, torch.ones_like(index)], dim=1), index)


class Recorder(PyTorchCallback):
    """Writes a line per hook to this rank's file."""

    def __init__(self, path: Path, ballast_mib: int = 0) -> None:
        self.path = path
        self.ballast_mib = ballast_mib
        self.epochs = 0

    def _note(self, hook: str, **arguments: Any) -> None:
        line = {"hook": hook, "at": time.time(), **arguments}
        with self.path.open("a") as file:
            file.write(json.dumps(line, default=lambda value: value.tolist()) + "\n")

    def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        self._note("on_trial_startup", first=first_batch_idx, uuid=checkpoint_uuid)

    def on_training_start(self) -> None:
        self._note("on_training_start")

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        self._note("on_training_epoch_start", epoch=epoch_idx)

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        self.epochs += 1
        self._note("on_training_epoch_end", epoch=epoch_idx, seen=self.epochs)

    def on_training_workload_end(
        self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]
    ) -> None:
        self._note("on_training_workload_end", average=avg_metrics, batches=len(batch_metrics))

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self._note("on_validation_end", metrics=metrics)

    def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
        if self.ballast_mib:
            own = self.path.stem.rpartition("-")[2]
            ballast = os.urandom(2**20) * self.ballast_mib
            (Path(checkpoint_dir) / f"ballast-{own}").write_bytes(ballast)
        self._note("on_checkpoint_write_end", folder=checkpoint_dir)

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        self._note("on_checkpoint_upload_end", uuid=uuid)

    def on_trial_shutdown(self) -> None:
        self._note("on_trial_shutdown")

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epochs = state_dict["epochs"]


class TrainingRecorder(Recorder):
    """A recorder without validation hooks."""

    on_validation_end = PyTorchCallback.on_validation_end


class ToyTrial(DeepSpeedTrial):
    """A linear model with dropout (so that random state matters) on a few samples.

    Hyperparameters: micro_batch_size, accumulation (or batch_size), zero_stage, train_samples,
    validation_samples, record (a folder for each rank's records), ballast_mib (the size of a
    file that each rank adds to its checkpoints), and at_batch + do: what happens in that batch
    on do_rank; only once with `once`, a file to create; `wait` waits for a file `wait_for`.
    pause_at: in that batch, each rank creates the file `paused` and waits for `wait_for`.
    at_evaluation: the same, in that call of evaluate_batch. records_validations: False for a
    callback without validation hooks.
    """

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        self.hparams = {
            "micro_batch_size": 2,
            "accumulation": 1,
            "zero_stage": 1,
            "train_samples": 64,
            "validation_samples": 12,
            "shuffle": True,
            **context.get_hparams(),
        }
        if self.hparams.get("at_batch") == "build":
            self._misbehave()
        # Parameters of even sizes: ZeRO-3 pads odd ones with uninitialised memory.
        model = torch.nn.Sequential(
            torch.nn.Linear(2, 16), torch.nn.Dropout(0.2), torch.nn.Tanh(), torch.nn.Linear(16, 2)
        )
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config={
                "train_micro_batch_size_per_gpu": self.hparams["micro_batch_size"],
                **self._batch(),
                "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
                "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
                "zero_optimization": {
                    "stage": self.hparams["zero_stage"],
                    "reduce_bucket_size": 1000,
                },
            },
        )
        self.engine = context.wrap_model_engine(engine)
        self.record = self.hparams.get("record")
        self.seen: list[list[float]] = []

    def _batch(self) -> dict[str, int]:
        if (whole := self.hparams.get("batch_size")) is not None:
            return {"train_batch_size": whole}
        return {"gradient_accumulation_steps": self.hparams["accumulation"]}

    def _file(self, name: str) -> Path:
        return Path(self.record) / f"{name}-{self.context.distributed.get_rank()}.jsonl"

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        if batch_idx == self.hparams.get("at_batch"):
            self._misbehave()
        if batch_idx == self.hparams.get("pause_at"):
            Path(self.hparams["paused"]).touch()
            self._wait()
        inputs, index = self.context.to_device(next(dataloader_iter))
        loss = self._loss(inputs, index)
        self.engine.backward(loss)
        self.engine.step()
        if self.record:
            with self._file("samples").open("a") as file:
                file.write(json.dumps([batch_idx, epoch_idx, *index.flatten().tolist()]) + "\n")
        return {"loss": loss, "rank": float(self.context.distributed.get_rank())}

    def _loss(self, inputs: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.engine(inputs).sum(1, keepdim=True), index / 64)

    def _misbehave(self) -> None:
        if self.context.distributed.get_rank() != self.hparams.get("do_rank", 0):
            return
        once = Path(self.hparams["once"]) if "once" in self.hparams else None
        if once is not None:
            if once.exists():
                return
            once.touch()
        do = self.hparams["do"]
        if do == "raise":
            raise RuntimeError("the toy was told to break")
        if do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if do == "lose node":
            # The agent, which has started the rank's fork server.
            agent = psutil.Process().parents()[1]
            assert "trialflow: agent" in agent.cmdline()[0], agent
            agent.kill()
            time.sleep(3600)
        if do == "drain node":
            psutil.Process().parents()[1].terminate()
            if self.hparams["at_batch"] == "build":
                time.sleep(3600)
        if do == "exit":
            os._exit(7)
        if do == "terminate":
            # As launchers and services do: to every process of the group.
            whom = -os.getpgrp() if os.getpgrp() == os.getpid() else os.getpid()
            subprocess.run(["kill", "-TERM", "--", str(whom)], check=False)
        if do == "stop":
            self.context.set_stop_requested(True)
        if do == "sleep":
            time.sleep(3600)
        if do == "wait":
            self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + 60
        while not Path(self.hparams["wait_for"]).exists():
            assert time.monotonic() < deadline, "the file was never created"
            time.sleep(0.01)

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        if batch_idx == self.hparams.get("at_evaluation"):
            self._misbehave()
        inputs, index = self.context.to_device(next(dataloader_iter))
        loss = self._loss(inputs, index)
        # Differs by rank and by batch: a lucky average cannot hide a wrong one.
        return {"loss": loss, "mean_index": index.mean()}

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(
            samples(self.hparams["train_samples"]),
            batch_size=self.hparams["micro_batch_size"],
            shuffle=self.hparams["shuffle"],
        )

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(
            samples(self.hparams["validation_samples"]), batch_size=self.hparams["micro_batch_size"]
        )

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        if not self.record:
            return {}
        callback = Recorder if self.hparams.get("records_validations", True) else TrainingRecorder
        return {"recorder": callback(self._file("hooks"), self.hparams.get("ballast_mib", 0))}
