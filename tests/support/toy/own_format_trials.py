"""A toy trial with a custom checkpoint format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from engine_trials import OwnConfig

from trial_core.deepspeed import DeepSpeedTrialContext


class OwnFormat(OwnConfig):
    """Overrides save, load and load_weights: each rank has a file ``own-{rank}.pt``."""

    def save(self, context: DeepSpeedTrialContext, path: Path) -> None:
        engine = self.engine
        state = {
            "module": engine.module.state_dict(),
            "optimizer": engine.optimizer.state_dict(),
            "scheduler": engine.lr_scheduler.state_dict(),
            "steps": [engine.micro_steps, engine.global_steps, engine.global_samples],
        }
        torch.save(state, self._own(path))

    def load(self, context: DeepSpeedTrialContext, load_path: Path) -> None:
        engine, state = self.engine, self._state(load_path)
        engine.module.load_state_dict(state["module"])
        engine.optimizer.load_state_dict(state["optimizer"])
        engine.lr_scheduler.load_state_dict(state["scheduler"])
        engine.micro_steps, engine.global_steps, engine.global_samples = state["steps"]

    def load_weights(self, context: DeepSpeedTrialContext, load_path: Path) -> None:
        self.engine.module.load_state_dict(self._state(load_path)["module"])

    def _state(self, folder: Path) -> dict[str, Any]:
        state: dict[str, Any] = torch.load(self._own(folder))
        return state

    def _own(self, folder: Path) -> Path:
        return folder / f"own-{self.context.distributed.get_rank()}.pt"
