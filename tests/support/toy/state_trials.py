"""Toy trials whose checkpoints hold unusual objects."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import deepspeed
import torch
from parallel_trials import ds_config
from toy_trial import ToyTrial

from trial_core.deepspeed import DeepSpeedTrialContext
from trial_core.pytorch import PyTorchCallback


class AttrDict(dict[str, Any]):
    """A dict whose keys are also attributes, as in the reference's example."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Best(NamedTuple):
    """What the callback remembers."""

    epoch: int
    loss: float


class Remembers(PyTorchCallback):
    """Its state holds mappings and sequences of other classes."""

    def __init__(self) -> None:
        self.losses: deque[float] = deque(maxlen=2)

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: Any) -> None:
        self.losses.append(avg_metrics["loss"])

    def state_dict(self) -> dict[str, Any]:
        return AttrDict(losses=self.losses, best=Best(3, min(self.losses)))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert type(state_dict) is dict
        assert type(state_dict["losses"]) is list
        assert state_dict["best"] == (3, min(state_dict["losses"]))
        self.losses.extend(state_dict["losses"])


class AttrDictConfig(ToyTrial):
    """DeepSpeed's configuration is an AttrDict of AttrDicts, which DeepSpeed saves."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        context.models.clear()
        config = AttrDict({
            name: AttrDict(value) if isinstance(value, dict) else value
            for name, value in ds_config(self.hparams).items()
        })  # fmt: skip
        model = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
        self.engine = context.wrap_model_engine(engine)

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {**super().build_callbacks(), "remembers": Remembers()}


class Unreadable(PyTorchCallback):
    """Its state holds an object of a class that no run reads."""

    def state_dict(self) -> dict[str, Any]:
        return {"self": self}


class UnreadableState(ToyTrial):
    """The state of its callback is refused."""

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"unreadable": Unreadable()}
