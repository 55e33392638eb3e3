"""Finds the settings of optimizers and schedulers that a restore overrides.

torch's `load_state_dict` restores the saved arguments of an optimizer or scheduler, whatever the
trial has constructed it with now. DeepSpeed's own schedulers keep their present arguments.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trial_core.common.text_format import first_few, told_apart

_PROGRESS = frozenset({"last_epoch", "last_batch_iteration"})
"""Parameters of schedulers that say where a schedule is, not how it goes."""

_SHOWN = 6
"""The maximum number of settings named for one optimizer or scheduler."""

_OTHER = object()
"""Stands for a value that is not a setting: a tensor of several numbers, a function."""

_Part = Mapping[str, Any]
"""The settings of a parameter group or of a scheduler, by name."""


class BuiltSettings:
    """The settings with which a trial has built its optimizers and schedulers."""

    def __init__(self, optimizers: Sequence[Any], schedulers: Sequence[Any]) -> None:
        self._optimizers = [*optimizers]
        self._schedulers = [*schedulers]
        self._built = self._now()

    def overridden(self) -> tuple[list[str], list[str]]:
        """The settings of optimizers and of schedulers that the present ones override, as text.

        ``optimizer 0 (AdamW): lr 0.001 (not 0.0001)``; a line for all that differ alike.
        """
        optimizers, schedulers = (
            [_differences(*each) for each in zip(built, now, strict=True)]
            for built, now in zip(self._built, self._now(), strict=True)
        )
        return (
            _lines("optimizer", self._optimizers, optimizers),
            _lines("scheduler", self._schedulers, schedulers),
        )

    def _now(self) -> tuple[list[list[_Part]], list[list[_Part]]]:
        return (
            [_of_optimizer(each, self._schedulers) for each in self._optimizers],
            [[dict(_of_scheduler(each, each.state_dict()))] for each in self._schedulers],
        )


def _of_optimizer(optimizer: Any, schedulers: Iterable[Any]) -> list[_Part]:
    """The settings of each group, without values that the optimizer or a scheduler changes."""
    own = [each for each in schedulers if getattr(each, "optimizer", optimizer) is optimizer]
    defaults = getattr(optimizer, "defaults", {})
    changed = {"params", *defaults.keys() - _parameters(optimizer)}
    if own:
        changed.add("lr")
    if any(getattr(each, "cycle_momentum", False) for each in own):
        changed |= {"betas", "momentum"}
    return [
        _plain_ones(group, changed | ({"lr"} if "initial_lr" in group else set()))
        for group in optimizer.param_groups
    ]


def _of_scheduler(scheduler: Any, state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The constructor's arguments that the state holds, also of schedulers in it."""
    given = _parameters(scheduler) - _PROGRESS
    names = {*given, *(f"{name}s" for name in given), "base_lrs"}
    for name, value in state.items():
        if name.lstrip("_") in names and (plain := _plain(value)) is not _OTHER:
            yield name.lstrip("_"), plain
    inner = getattr(scheduler, "_schedulers", None) or ()
    for index, (part, of) in enumerate(zip(inner, state.get("_schedulers") or (), strict=False)):
        yield from ((f"schedulers.{index}.{name}", each) for name, each in _of_scheduler(part, of))


def _parameters(built: Any) -> set[str]:
    """The names of all parameters of its constructors."""
    constructors = (vars(each).get("__init__") for each in type(built).__mro__)
    known = (inspect.signature(each).parameters for each in constructors if each is not None)
    return set(chain.from_iterable(known))


def _plain_ones(group: Mapping[str, Any], without: Iterable[str]) -> _Part:
    plain = {name: _plain(value) for name, value in group.items() if name not in without}
    return {name: value for name, value in plain.items() if value is not _OTHER}


def _plain(value: Any) -> Any:
    """A copy of a number, text, None, or of a sequence of these; `_OTHER` for all else."""
    if isinstance(value, torch.Tensor):
        is_number = value.numel() == 1 and not isinstance(value, DTensor)
        return _plain(value.item()) if is_number else _OTHER
    if isinstance(value, Counter):  # a MultiStepLR's milestones
        return _plain(sorted(value.elements()))
    if isinstance(value, (list, tuple)):
        parts = [_plain(each) for each in value]
        return _OTHER if any(each is _OTHER for each in parts) else parts
    return value if value is None or isinstance(value, (bool, int, float, str)) else _OTHER


def _differences(built: Sequence[_Part], now: Sequence[_Part]) -> tuple[str, ...]:
    """``lr 0.001 (not 0.0001)``; where it is not all groups, in how many."""
    found: Counter[str] = Counter()
    for before, after in zip(built, now, strict=False):
        for name, value in before.items():
            if name in after and not _is_same(value, after[name]):
                restored, given = told_apart(after[name], value)
                found[f"{name} {restored} (not {given})"] += 1
    return tuple(
        text if groups == len(built) else f"{text} in {groups} of {len(built)} groups"
        for text, groups in found.items()
    )


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        # A number of a float32 tensor has its rounding.
        return math.isclose(one, other, rel_tol=1e-6) or (math.isnan(one) and math.isnan(other))
    return bool(one == other)


def _lines(kind: str, built: Sequence[Any], differences: Sequence[tuple[str, ...]]) -> list[str]:
    alike: dict[tuple[str, tuple[str, ...]], list[str]] = defaultdict(list)
    for index, found in enumerate(differences):
        if found:
            alike[(type(built[index]).__name__, found)].append(str(index))
    return [
        f"{kind}{'s' if len(indices) > 1 else ''} {first_few(indices)} ({name}): "
        f"{first_few(found, _SHOWN)}"
        for (name, found), indices in alike.items()
    ]
