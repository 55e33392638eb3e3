"""The settings with which a trial was built, and which of them count after a restore.

Every checkpoint has them (``trialflow/resume.json``). A restore brings back the optimizers and
schedulers of the checkpoint with all their values. A setting that was built with one value for the
checkpoint and with another one now was changed by a person, and the new one is to count. All else
is what training has made of it, and stays the checkpoint's. So nothing changes if nothing was
changed, and a rate that a schedule or the trial itself has moved is not taken for a setting.
"""

from __future__ import annotations

import inspect
import json
import math
import warnings
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from trial_core.common.decoding import convert
from trial_core.common.text_format import clean, first_few, plural, told_apart
from trial_core.errors import CheckpointError
from trial_core.messages import RestoredSettings

FILE = "resume.json"

_NOT_OF_SCHEDULER = frozenset({"last_epoch", "_step_count", "_last_lr", "_schedulers"})
"""Values in a scheduler's state that say where it is, not how it goes; and the schedulers in it."""

_SCHEDULED = frozenset({"lr", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"})
"""Values in an optimizer's groups that are its schedule's."""

_SHOWN = 6
"""The maximum number of settings named for one optimizer or scheduler."""

_MAX_STEPS = 10_000_000
"""A schedule is brought to its step by at most so many steps, some seconds for each million."""

_OTHER = object()
"""Stands for a value that is not a setting: a tensor of several numbers, a function."""

_Settings = dict[str, Any]
"""Plain values by name."""


class SavedPart(msgspec.Struct, frozen=True):
    """A part of the trial that has saved a checkpoint; see `SettingsPart`."""

    kind: str
    type: str
    groups: list[_Settings]


class SavedSettings(msgspec.Struct, frozen=True):
    """The settings in a checkpoint.

    Attributes:
        parts: of optimizers and the like.
        data: of the training data; empty if they are not known.
    """

    parts: list[SavedPart]
    data: _Settings = {}


class SettingsPart(ABC):
    """An optimizer, a scheduler, a scaler or an engine of a trial, as the trial has built it.

    Attributes:
        kind: ``optimizer``, ``scheduler``, ``scaler`` or ``engine``.
        type: the name of its class.
        groups: its settings; an optimizer has several groups of them.
    """

    kind: str

    def __init__(self, part: Any, groups: Iterable[_Settings]) -> None:
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
    """

    kind = "optimizer"

    def __init__(self, optimizer: Optimizer, schedulers: Sequence[Any]) -> None:
        self._optimizer = optimizer
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
        if getattr(self._scheduler, "T_cur", 0) % 1:
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

    def _in_groups(self) -> list[_Settings]:
        cycles = getattr(self._scheduler, "cycle_momentum", False)
        names = _SCHEDULED | ({"betas", "momentum"} if cycles else set())
        return [
            {name: deepcopy(value) for name, value in group.items() if name in names}
            for group in self._scheduler.optimizer.param_groups
        ]

    def _put_back(self, state: Mapping[str, Any], values: Sequence[_Settings]) -> None:
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


class BuiltSettings:
    """The settings of all parts of a trial. Make it when the trial is built."""

    def __init__(self, parts: Iterable[SettingsPart]) -> None:
        self._parts = [*parts]

    def to_json(self) -> str:
        """The settings as they are compared between ranks, and stored."""
        return json.dumps(
            [{"kind": each.kind, "type": each.type, "groups": each.groups} for each in self._parts]
        )

    def write(self, folder: Path, data: Mapping[str, Any]) -> None:
        """Write them, and those of the training data, to `FILE` in a folder of a checkpoint."""
        content = {"parts": json.loads(self.to_json()), "data": data}
        (folder / FILE).write_text(json.dumps(content, indent=1))

    def require_same_types(self, saved: SavedSettings) -> None:
        """Check, before a restore, that the checkpoint is of the same kinds of parts.

        Raises:
            CheckpointError: it is of another optimizer or scheduler, or of other groups.
        """
        for index, part, before in self._pairs(saved):
            if part.kind in ("optimizer", "scheduler") and not part.continues(before.type):
                then = clean(before.type)
                raise CheckpointError(
                    f"{part.kind} {index} was of {then} when the checkpoint was saved, and "
                    f"the trial has built one of {part.type}: they have different states. Resume "
                    f"with {then}, or begin a new trial with the checkpoint's weights: "
                    "searcher.source_checkpoint_uuid and searcher.source_weights_only=true"
                )
            groups, groups_then = len(part.groups), len(before.groups)
            if part.kind == "optimizer" and groups != groups_then:
                raise CheckpointError(
                    f"optimizer {index} was built with {plural(groups_then, 'parameter group')} "
                    f"when the checkpoint was saved, and with {groups} now: their states do not "
                    f"fit. Build {groups_then}, or begin a new trial with the checkpoint's "
                    "weights: searcher.source_checkpoint_uuid and "
                    "searcher.source_weights_only=true"
                )

    def apply(self, saved: SavedSettings, keep: Collection[str] = ()) -> RestoredSettings:
        """After a restore, have those settings count that were built with another value now.

        Args:
            keep: ``optimizer`` or ``optimizer.lr``: the checkpoint's values stay.
        """
        new, kept = _Told(), _Told()
        not_kept: list[str] = []
        unused = set(keep)
        for index, part, before in self._pairs(saved):
            differing = [
                _differing(*each) for each in zip(part.groups, before.groups, strict=False)
            ]
            asked = [
                {x for x in each if {part.kind, f"{part.kind}.{x}"} & {*keep}} for each in differing
            ]
            if any(asked):
                unused -= {part.kind, *(f"{part.kind}.{x}" for each in asked for x in each)}
                if (why := part.keep(before)) is not None:
                    not_kept.append(f"{part.kind} {index}, because {why}")
                    asked = [set() for _ in asked]
            kept.add(index, part, before, asked, "you asked for it (keep)")
            changed = [names - those for names, those in zip(differing, asked, strict=True)]
            if part.kind == "optimizer":
                of_state = [
                    {x for x in names if _shapes_state(x, now[x], then[x])}
                    for now, then, names in zip(part.groups, before.groups, changed, strict=True)
                ]
                changed = [names - those for names, those in zip(changed, of_state, strict=True)]
                kept.add(index, part, before, of_state, "the optimizer's state depends on it")
            if any(changed):
                why = part.apply(changed)
                (new if why is None else kept).add(index, part, before, changed, why or "")
        not_kept += [f"{each}, because it has not changed" for each in keep if each in unused]
        return RestoredSettings(new.lines(), kept.lines(), not_kept=not_kept)

    def _pairs(self, saved: SavedSettings) -> Iterator[tuple[int, SettingsPart, SavedPart]]:
        for kind in dict.fromkeys(each.kind for each in self._parts):
            own = [each for each in self._parts if each.kind == kind]
            others = [each for each in saved.parts if each.kind == kind]
            for index, (part, before) in enumerate(zip(own, others, strict=False)):
                yield index, part, before


class _Told:
    """What is said of parts; a line for all that changed alike."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, tuple[str, ...], str], list[str]] = defaultdict(list)

    def add(
        self, index: int, part: SettingsPart, before: SavedPart, names: Sequence[set[str]], why: str
    ) -> None:
        count: Counter[str] = Counter()
        for now, then, of_group in zip(part.groups, before.groups, names, strict=False):
            for name in (each for each in now if each in of_group):
                old, new = told_apart(_shown(then[name]), _shown(now[name]))
                values = f" stays {old} (not {new})" if why else f" {old} -> {new}"
                if name == "_schedule_phases":  # long, and they follow from the other settings
                    values = ""
                count[_NAMES.get(name, name) + values] += 1
        texts = tuple(
            text if groups == len(names) else f"{text} in {groups} of {len(names)} groups"
            for text, groups in count.items()
        )
        if texts:
            self._found[(part.kind, part.type, texts, why)].append(str(index))

    def lines(self) -> list[str]:
        return [
            f"{kind}{'s' if len(indices) > 1 else ''} {first_few(indices)} ({name}): "
            f"{clean(first_few(texts, _SHOWN))}{f', because {why}' if why else ''}"
            for (kind, name, texts, why), indices in self._found.items()
        ]


_NAMES = {"base_lrs": "lr", "_schedule_phases": "phases", "lr_lambdas": "object"}
"""How people call a setting."""


def changes_of_data(saved: SavedSettings, now: Mapping[str, Any]) -> list[str]:
    """What has changed of the training data of a trial that continues, as text.

    Raises:
        CheckpointError: the size of a batch has: the place in the data is counted in batches.
    """
    before, name = saved.data, "batch size"
    if name in before and name in now and before[name] != now[name]:
        was = clean(str(before[name]))
        raise CheckpointError(
            f"a batch had {was} samples when the checkpoint was saved, and has "
            f"{now[name]} now: the place in the data, schedules and the length of training are "
            "counted in batches, so samples would be left out or come twice. Resume with "
            f"{was} samples a batch; or begin a new trial with the checkpoint's weights: "
            "searcher.source_checkpoint_uuid and searcher.source_weights_only=true"
        )
    differing = [each for each in now if each in _differing(now, before)]
    told = (f"{each} {' -> '.join(told_apart(before[each], now[each]))}" for each in differing)
    text = ", ".join(told)
    return [f"training data: {text}, also for the rest of this epoch"] if text else []


def read_settings(folder: Path) -> SavedSettings | None:
    """Read what `BuiltSettings.write` wrote in a folder of a checkpoint; None if it has none."""
    try:
        return convert(json.loads((folder / FILE).read_bytes()), SavedSettings)
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:  # also msgspec's
        raise CheckpointError(f"the checkpoint's {FILE} is not trialflow's: {error}") from error


def of_scheduler(scheduler: Any) -> Any:
    """The optimizer of torch's kind that a scheduler changes."""
    found = getattr(scheduler, "optimizer", None)
    inner = getattr(scheduler, "_schedulers", None)
    if found is None and inner:
        return of_scheduler(inner[0])
    return found


def plain(settings: Mapping[str, Any]) -> _Settings:
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


def _shapes_state(name: str, now: Any, then: Any) -> bool:
    """True for a change of what an optimizer's state has, such as ``amsgrad`` turned on."""
    if name == "momentum":
        return not (now and then)
    return isinstance(now, bool) or name == "initial_accumulator_value"


def _differing(now: Mapping[str, Any], then: Mapping[str, Any]) -> set[str]:
    return {name for name in now if name in then and not _is_same(now[name], then[name])}


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[x], other[x]) for x in one)
    if isinstance(one, float) and isinstance(other, float):  # a rate in a tensor is a float32
        return math.isclose(one, other, rel_tol=1e-7) or (math.isnan(one) and math.isnan(other))
    return bool(one == other)


def _shown(value: Any) -> Any:
    """One value for a list of equal ones, such as the rates of several groups."""
    if isinstance(value, list) and value and all(_is_same(each, value[0]) for each in value):
        return value[0]
    return value
