"""The settings of engines and of DeepSpeed's own schedulers, for `BuiltSettings`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from torch.nn import Module
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trial_core.common.text_format import is_finite_number
from trial_core.errors import CheckpointError
from trial_core.rank.state_files.parameter_order import names_in, saved_places
from trial_core.rank.state_files.settings_parts import (
    OptimizerPart,
    SavedPart,
    SchedulePart,
    SettingsPart,
    plain,
)

_DERIVED = frozenset({"last_batch_iteration", "delta_lrs", "inverse_log_warm_up"})
"""Attributes of DeepSpeed's schedulers that are no settings."""

_OF_DYNAMIC = ("loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale")
"""The settings of a dynamic loss scaler, of which `loss_scale` is 0."""

_MOVED = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""What training changes of a dynamic loss scaler."""


def engine_parts(
    engines: Sequence[DeepSpeedEngine], schedulers: Sequence[Any]
) -> Iterator[SettingsPart]:
    """The parts of engines that have settings, besides their optimizers."""
    for scheduler in schedulers:
        if isinstance(scheduler, (LRScheduler, ReduceLROnPlateau)):
            yield SchedulePart(scheduler, schedulers)
        else:
            yield _DeepSpeedSchedule(scheduler)
    for engine in engines:
        yield _Engine(engine)
        if engine.fp16_enabled():
            yield _LossScale(engine)


class EngineOptimizer(OptimizerPart):
    """An optimizer within an engine.

    DeepSpeed takes another class of its own, with the same state, where the optimizer is offloaded
    or ``torch_adam`` changes. In 16 bits without ZeRO, it keeps the state of copies in fp32: their
    names are those of the parameters.
    """

    def __init__(
        self, engine: DeepSpeedEngine, schedulers: Sequence[Any], modules: Sequence[Module] = ()
    ) -> None:
        super().__init__(engine.basic_optimizer, schedulers, modules)
        if not self.parameters:
            self.parameters = names_of_copied(engine, modules)
        is_copied = hasattr(engine.optimizer, "fp16_groups")
        self._is_flat_if_fused = is_copied and not engine.zero_optimization()

    def continues(self, type_then: str) -> bool:
        # In 16 bits without ZeRO, DeepSpeed flattens the weights of FusedAdam, and of no other.
        flat = "FusedAdam"
        if self._is_flat_if_fused and (self.type == flat) != (type_then == flat):
            return False
        return _family(self.type) == _family(type_then)


def names_of_copied(engine: DeepSpeedEngine, modules: Sequence[Module]) -> list[str]:
    """The names of the parameters of which an engine in 16 bits without ZeRO has copies in fp32."""
    is_zero = engine.zero_optimization()
    groups = () if is_zero else getattr(engine.optimizer, "fp16_groups", ())
    return names_in(modules, chain.from_iterable(groups))


def require_same_order(now: Sequence[str], then: Sequence[str]) -> None:
    """Check that copies have the places at which they were saved. Raises CheckpointError if not."""
    if saved_places(now, then) != [*range(len(now))]:
        raise CheckpointError(
            "the optimizer's parameters are in another order than when the checkpoint was saved, "
            "and without ZeRO, DeepSpeed loads its fp32 weights in 16 bits by their places. Define "
            "the layers, and give them to the optimizer, in the order that was saved, or load only "
            "the weights: searcher.source_weights_only=true"
        )


def _family(name: str) -> str:
    """``Adam`` for DeepSpeedCPUAdam, FusedAdam and AdamW."""
    return re.sub(r"^(DeepSpeed|Zenflow|ZenFlow|CPU|Fused)+", "", name).removesuffix("W")


class _DeepSpeedSchedule(SettingsPart):
    """A scheduler that restores its step alone, but sets the rate only in its next step."""

    kind = "scheduler"

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        own = {
            name: value
            for name, value in plain(getattr(scheduler, "__dict__", {})).items()
            if name not in _DERIVED and not name.startswith("_")
        }
        super().__init__(scheduler, [own])

    def keep(self, saved: SavedPart) -> str:
        return "DeepSpeed's schedules do not save their constants"

    def apply(self, changed: Sequence[Collection[str]]) -> str | None:
        at = getattr(self._scheduler, "last_batch_iteration", None)
        if at is None:
            return "it does not tell how often it has stepped"
        if at >= 0:
            self._scheduler.step(at)
        return None


class _Engine(SettingsPart):
    """The clipping of gradients. Only some of DeepSpeed's optimizers restore the checkpoint's."""

    kind = "engine"

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine
        super().__init__(engine, [{"gradient_clipping": float(engine.gradient_clipping())}])

    def keep(self, saved: SavedPart) -> str | None:
        norm = saved.groups[0]["gradient_clipping"]
        if not is_finite_number(norm):
            return "the checkpoint's gradient_clipping is not a number"
        self._clip(norm)
        return None

    def apply(self, changed: Sequence[Collection[str]]) -> None:
        self._clip(self.groups[0]["gradient_clipping"])

    def _clip(self, norm: float) -> None:
        self._engine._config.gradient_clipping = norm  # read at each step without ZeRO
        if hasattr(self._engine.optimizer, "clip_grad"):
            self._engine.optimizer.clip_grad = norm


class _LossScale(SettingsPart):
    """The loss scale of fp16. A dynamic one keeps the scale that training has found."""

    kind = "scaler"

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine
        self._built = deepcopy(getattr(engine.optimizer, "loss_scaler", None))
        fp16 = engine._config.float16_config
        names = ("loss_scale",) if fp16.loss_scale else ("loss_scale", *_OF_DYNAMIC)
        super().__init__(engine, [{name: getattr(fp16, name) for name in names}])

    def apply(self, changed: Sequence[Collection[str]]) -> str | None:
        restored = getattr(self._engine.optimizer, "loss_scaler", None)
        if restored is None or self._built is None:
            return "DeepSpeed restores it without ZeRO"
        if isinstance(restored, DynamicLossScaler) and isinstance(self._built, DynamicLossScaler):
            for name in _MOVED:
                setattr(self._built, name, getattr(restored, name))
        self._engine.optimizer.loss_scaler = self._built
        return None
