"""The parts of a trial that have settings: its optimizers, schedulers and loss scalers.

`BuiltSettings` compares them with those of a checkpoint.
"""

from __future__ import annotations

import inspect
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any

import msgspec
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from trial_core.rank.state_files.parameter_order import parameter_names

_NOT_OF_SCHEDULER = frozenset({"last_epoch", "_step_count", "_last_lr", "_schedulers"})
"""Values in a scheduler's state that say where it is, not how it goes; and the schedulers in it."""

_SCHEDULED = frozenset({"lr", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"})
"""Values in an optimizer's groups that are its schedule's."""

_MAX_STEPS = 10_000_000
"""A schedule is brought to its step by at most so many steps, some seconds for each million."""

_OTHER = object()
"""Stands for a value that is not a setting: a tensor of several numbers, a function."""

Settings = dict[str, Any]
"""Plain values by name."""


class SavedPart(msgspec.Struct, frozen=True):
    """A part of the trial that has saved a checkpoint; see `SettingsPart`."""

    kind: str
    type: str
    groups: list[Settings]
    parameters: list[str] = []


class SettingsPart(ABC):
    """An optimizer, a scheduler, a scaler or an engine of a trial, as the trial has built it.

    Attributes:
        kind: ``optimizer``, ``scheduler``, ``scaler`` or ``engine``.
        type: the name of its class.
        groups: its settings; an optimizer has several groups of them.
        parameters: the names of an optimizer's parameters, if they are known.
    """

    kind: str
    parameters: Sequence[str] = ()

    def __init__(self, part: Any, groups: Iterable[Settings]) -> None:
        self.type = type(part).__qualname__
        self.groups = [*groups]

    def continues(self, type_then: str) -> bool:
        """Return whether a state of a part of that type means the same to this one."""
        return self.type == type_then

    def keep(self, saved: SavedPart) -> str | None:
        """Have the checkpoint's values count, as far as the restore has not brought them back.

        Returns:
            Why the built ones count, if they do.
        """
        return None

    @abstractmethod
    def apply(self, changed: Sequence[Collection[str]]) -> str | None:
        """Have built values count again after a restore.

        Args:
            changed: for each group, the names of these settings.

        Returns:
            Why the checkpoint's stay, if they do.
        """


class OptimizerPart(SettingsPart):
    """An optimizer of torch's kind.

    Args:
        schedulers: of the trial; its own ones are among them.
        modules: the trial's models, which have the names of its parameters.
    """

    kind = "optimizer"

    def __init__(
        self, optimizer: Optimizer, schedulers: Sequence[Any], modules: Sequence[nn.Module] = ()
    ) -> None:
        self._optimizer = optimizer
        self.parameters = parameter_names(optimizer, modules)
        of_it = (each for each in schedulers if of_scheduler(each) is optimizer)
        # A plateau's scheduler only lowers the rate that the optimizer has.
        own = [each for each in of_it if not isinstance(each, ReduceLROnPlateau)]
        # An optimizer's own counters are among its defaults, too.
        without = {"params", *getattr(optimizer, "defaults", {}).keys() - _parameters(optimizer)}
        if own:
            without |= _SCHEDULED
        if any(getattr(each, "cycle_momentum", False) for each in own):
            without |= {"betas", "momentum"}
        self._values = [
            {
                name: deepcopy(value)
                for name, value in group.items()
                if isinstance(name, str)
                and name not in without
                and _plain(value) is not _OTHER
                # With an initial rate it has a schedule that the trial keeps to itself.
                and not (name == "lr" and "initial_lr" in group)
            }
            for group in optimizer.param_groups
        ]
        super().__init__(optimizer, map(plain, self._values))

    def apply(self, changed: Sequence[Collection[str]]) -> None:
        groups = zip(self._optimizer.param_groups, self._values, changed, strict=False)
        for group, values, names in groups:
            for name in names:
                _assign(group, name, values[name])


class SchedulePart(SettingsPart):
    """A scheduler of torch's kind. With new settings it is brought to its step by its own steps.

    Args:
        schedulers: of the trial.
    """

    kind = "scheduler"

    def __init__(self, scheduler: Any, schedulers: Sequence[Any]) -> None:
        self._scheduler = scheduler
        self._is_alone = [of_scheduler(each) for each in schedulers].count(
            of_scheduler(scheduler)
        ) == 1
        try:
            self._fresh = deepcopy(scheduler.state_dict())
        except Exception:  # noqa: BLE001 - the trial's own class may hold anything
            self._fresh = {}
        self._values, self._first = self._in_groups(), _steps_done(scheduler)
        super().__init__(scheduler, [dict(_of_scheduler(self._fresh))])

    def apply(self, changed: Sequence[Collection[str]]) -> str | None:
        if isinstance(self._scheduler, ReduceLROnPlateau):
            return "it depends on metrics that are past"
        if not self._is_alone:
            return "the optimizer has several schedulers"
        steps = _steps_done(self._scheduler)
        if steps is None or self._first is None:
            return "it does not tell how often it has stepped"
        if isinstance(at := getattr(self._scheduler, "T_cur", None), float) and not at.is_integer():
            return "the trial itself gives it its epoch"
        if steps - self._first > _MAX_STEPS:
            return f"it has stepped more than {_MAX_STEPS:,} times"
        try:
            restored = deepcopy(self._scheduler.state_dict())
        except Exception as error:  # noqa: BLE001 - it may be the trial's own class
            return f"{type(error).__name__} in its state_dict: {error}"
        values = self._in_groups()
        try:
            self._put_back(self._fresh, self._values)
            with warnings.catch_warnings():  # no step of the optimizer comes before these
                warnings.simplefilter("ignore")
                for _ in range(steps - self._first):
                    self._scheduler.step()
        except Exception as error:  # noqa: BLE001 - it may be the trial's own class
            self._put_back(restored, values)
            return f"{type(error).__name__} at its step: {error}"
        return None

    def _in_groups(self) -> list[Settings]:
        cycles = getattr(self._scheduler, "cycle_momentum", False)
        names = _SCHEDULED | ({"betas", "momentum"} if cycles else set())
        return [
            {name: deepcopy(value) for name, value in group.items() if name in names}
            for group in self._scheduler.optimizer.param_groups
        ]

    def _put_back(self, state: Mapping[str, Any], values: Sequence[Settings]) -> None:
        self._scheduler.load_state_dict(deepcopy(state))
        for group, own in zip(self._scheduler.optimizer.param_groups, values, strict=False):
            for name, value in own.items():
                _assign(group, name, value)


class ScalerPart(SettingsPart):
    """A loss scaler of torch's. Its present scale is what training has made of it."""

    kind = "scaler"

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler
        names = self._NAMES if scaler.is_enabled() else ()
        super().__init__(scaler, [{name: getattr(scaler, f"get_{name}")() for name in names}])

    _NAMES = ("growth_factor", "backoff_factor", "growth_interval")

    def apply(self, changed: Sequence[Collection[str]]) -> None:
        for name in changed[0]:
            getattr(self._scaler, f"set_{name}")(self.groups[0][name])


def of_scheduler(scheduler: Any) -> Any:
    """The optimizer of torch's kind that a scheduler changes."""
    found = getattr(scheduler, "optimizer", None)
    inner = getattr(scheduler, "_schedulers", None)
    if found is None and inner:
        return of_scheduler(inner[0])
    return found


def plain(settings: Mapping[str, Any]) -> Settings:
    """Copies of those settings that are a number, text, None, or a list or mapping of these."""
    values = {name: _plain(value) for name, value in settings.items()}
    return {
        name: value
        for name, value in values.items()
        if isinstance(name, str) and value is not _OTHER
    }


def _assign(group: dict[str, Any], name: str, value: Any) -> None:
    present = group.get(name)
    if isinstance(present, torch.Tensor) and present.numel() == 1:
        present.fill_(float(value))  # a captured graph reads this tensor
    else:
        group[name] = deepcopy(value)


def _steps_done(scheduler: Any) -> int | None:
    """How often a scheduler has stepped; None if it does not tell."""
    steps = getattr(scheduler, "last_epoch", None)
    if isinstance(steps, int):
        return steps
    inner = getattr(scheduler, "_schedulers", None)
    return _steps_done(inner[0]) if inner else None


def _of_scheduler(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The plain values of a scheduler's state when it is built, also of schedulers in it."""
    of_itself = {name: state[name] for name in state if name not in _NOT_OF_SCHEDULER}
    yield from plain(of_itself).items()
    for index, inner in enumerate(state.get("_schedulers") or ()):
        yield from ((f"schedulers.{index}.{name}", each) for name, each in _of_scheduler(inner))


def _parameters(built: Any) -> set[str]:
    """The names of all parameters of its constructors."""
    found: set[str] = set()
    for constructor in (vars(each).get("__init__") for each in type(built).__mro__):
        if constructor is not None:
            with suppress(ValueError, TypeError):  # of a compiled class
                found.update(inspect.signature(constructor).parameters)
    return found


def _plain(value: Any) -> Any:
    """A copy of a number, text, None, or of a list or mapping of these; `_OTHER` for all else."""
    if isinstance(value, torch.Tensor):
        is_number = value.numel() == 1 and not isinstance(value, DTensor)
        return _plain(value.item()) if is_number else _OTHER
    if isinstance(value, Counter):  # a MultiStepLR's milestones
        return _plain(sorted(value.elements()))
    if isinstance(value, (list, tuple)):
        parts = [_plain(each) for each in value]
        return _OTHER if any(each is _OTHER for each in parts) else parts
    if isinstance(value, Mapping):  # a phase of OneCycleLR, what a LambdaLR's object holds
        return plain(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else _OTHER
