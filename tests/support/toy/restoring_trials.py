"""Trials with code of their own around their checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from topology_trials import AnyTopology
from toy_trial import ToyTrial

from trial_core.deepspeed import DeepSpeedTrialContext


class AddsFiles(AnyTopology):
    """Adds a file to those of DeepSpeed, which it reads again on any number of ranks."""

    def save(self, context: DeepSpeedTrialContext, path: Path) -> None:
        super().save(context, path)
        if context.distributed.get_rank() == 0:
            (path / "notes").mkdir()
            (path / "notes" / "own.json").write_text(json.dumps(self.engine.global_steps))

    def load(self, context: DeepSpeedTrialContext, load_path: Path) -> None:
        super().load(context, load_path)
        assert json.loads((load_path / "notes" / "own.json").read_text()) == (
            self.engine.global_steps
        )


class LoadsAlone(AnyTopology):
    """Its `load` reads DeepSpeed's files itself."""

    def load(self, context: DeepSpeedTrialContext, load_path: Path) -> None:
        self.engine.load_checkpoint(str(load_path), tag="model0")


class CountsLoads(ToyTrial):
    """Writes a line for each load: how many steps the engine had made."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        self.load_checkpoint = self.engine.load_checkpoint
        self.engine.load_checkpoint = self.count

    def count(self, *args: Any, **options: Any) -> Any:
        with self._file("loads").open("a") as file:
            file.write(f"{self.engine.global_steps}\n")
        return self.load_checkpoint(*args, **options)


class Unrestorable(ToyTrial):
    """DeepSpeed saves it, and cannot load it."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        self.engine.load_checkpoint = self.refuse

    def refuse(self, *args: Any, **options: Any) -> Any:
        raise AssertionError

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        assert batch_idx < 3, "it should have ended at its first checkpoint"
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)
