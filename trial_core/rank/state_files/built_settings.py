"""The settings with which a trial was built, and which of them count after a restore.

Every checkpoint has them (``trialflow/resume.json``). A restore brings back the optimizers and
schedulers of the checkpoint with all their values. A setting that was built with one value for the
checkpoint and with another one now was changed by a person, and the new one is to count. All else
is what training has made of it, and stays the checkpoint's. So nothing changes if nothing was
changed, and a rate that a schedule or the trial itself has moved is not taken for a setting.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from trial_core.common.decoding import convert
from trial_core.common.text_format import clean, first_few, plural, told_apart
from trial_core.errors import CheckpointError
from trial_core.messages import RestoredSettings
from trial_core.rank.state_files.parameter_order import saved_places
from trial_core.rank.state_files.settings_parts import SavedPart, Settings, SettingsPart

FILE = "resume.json"

Record = TypeVar("Record", bound=msgspec.Struct)

UNCHANGED = (
    "neither the experiment nor its code folder has changed: to have it count, set it in the "
    "experiment"
)
"""Why all of a checkpoint's values stay. Another value may be drawn, or depend on the machine."""

_WEIGHTS_ALONE = (
    "or begin a new trial with the checkpoint's weights: searcher.source_checkpoint_uuid and "
    "searcher.source_weights_only=true"
)

_SHOWN = 6
"""The maximum number of settings named for one optimizer or scheduler."""


class SavedSettings(msgspec.Struct, frozen=True):
    """The settings in a checkpoint.

    Attributes:
        parts: of optimizers and the like.
        data: of the training data; empty if they are not known.
        sample_lists: digests of the lists in its dataset; see `sample_lists`.
    """

    parts: list[SavedPart]
    data: Settings = {}
    sample_lists: dict[str, str] = {}

    @property
    def batch_samples(self) -> int | None:
        """Samples of a batch; None if they are not known."""
        samples = self.data.get("batch size")
        return samples if isinstance(samples, int) else None


class BuiltSettings:
    """The settings of all parts of a trial. Make it when the trial is built."""

    def __init__(self, parts: Iterable[SettingsPart]) -> None:
        self._parts = [*parts]

    def to_json(self) -> str:
        """The settings as they are compared between ranks; `write` adds names of parameters."""
        return json.dumps(
            [{"kind": each.kind, "type": each.type, "groups": each.groups} for each in self._parts]
        )

    def write(
        self, folder: Path, data: Mapping[str, Any], sample_lists: Mapping[str, str] | None = None
    ) -> None:
        """Write them, and those of the training data, to `FILE` in a folder of a checkpoint."""
        parts = zip(json.loads(self.to_json()), self._parts, strict=True)
        content = {
            "parts": [{**each, "parameters": [*part.parameters]} for each, part in parts],
            "data": data,
            "sample_lists": sample_lists or {},
        }
        (folder / FILE).write_text(json.dumps(content, indent=1))

    def require_same_types(self, saved: SavedSettings) -> None:
        """Check, before a restore, that the checkpoint is of the same kinds of parts.

        Raises:
            CheckpointError: it is of other optimizers or schedulers, or of other groups.
        """
        for index, part, before in self._pairs(saved):
            if part.kind in ("optimizer", "scheduler") and not part.continues(before.type):
                then = clean(before.type)
                raise CheckpointError(
                    f"{part.kind} {index} was of {then} when the checkpoint was saved, and "
                    f"the trial has built one of {part.type}: they have different states. Resume "
                    f"with {then}, {_WEIGHTS_ALONE}"
                )
            groups, groups_then = len(part.groups), len(before.groups)
            if part.kind == "optimizer" and groups != groups_then:
                raise CheckpointError(
                    f"optimizer {index} was built with {plural(groups_then, 'parameter group')} "
                    f"when the checkpoint was saved, and with {groups} now: their states do not "
                    f"fit. Build {groups_then}, {_WEIGHTS_ALONE}"
                )

    def require_same_counts(self, saved: SavedSettings, removed: Collection[str] = ()) -> None:
        """Check, before a restore, that the checkpoint is of as many optimizers and schedulers.

        Args:
            removed: kinds of parts, of whose states a callback has removed or added some.

        Raises:
            CheckpointError: it is of more or fewer.
        """
        for kind in ("optimizer", "scheduler"):
            count, count_then = _count(kind, self._parts), _count(kind, saved.parts)
            if count != count_then and kind not in removed:
                raise CheckpointError(
                    f"the checkpoint was saved with {plural(count_then, kind)}, and the trial has "
                    f"built {count}: their states do not fit. Build {count_then}, "
                    f"{_WEIGHTS_ALONE}"
                )

    def apply(
        self, saved: SavedSettings, keep: Collection[str] = (), why_all: str = ""
    ) -> RestoredSettings:
        """After a restore, have those settings count that were built with another value now.

        Args:
            keep: ``optimizer`` or ``optimizer.lr``: the checkpoint's values stay.
            why_all: if given, all of the checkpoint's values stay, for this reason. The next
                checkpoint has them as built ones, too.
        """
        new, kept = _Told(), _Told()
        not_kept, renamed = list[str](), list[str]()
        unused = set(keep)
        for index, part, before in self._pairs(saved):
            differing = [
                _differing(*each) for each in zip(part.groups, before.groups, strict=False)
            ]
            asked = [
                {x for x in each if why_all or {part.kind, f"{part.kind}.{x}"} & {*keep}}
                for each in differing
            ]
            if any(asked):
                unused -= {part.kind, *(f"{part.kind}.{x}" for each in asked for x in each)}
                if (why := part.keep(before)) is not None:
                    not_kept.append(f"{part.kind} {index}, because {why}")
                    asked = [set() for _ in asked]
            kept.add(index, part, before, asked, why_all or "you asked for it (keep)")
            if why_all:
                for now, then, names in zip(part.groups, before.groups, asked, strict=False):
                    now.update({name: then[name] for name in names})
            changed = [names - those for names, those in zip(differing, asked, strict=True)]
            if part.kind == "optimizer":
                of_state = [
                    {x for x in names if _shapes_state(x, now[x], then[x])}
                    for now, then, names in zip(part.groups, before.groups, changed, strict=True)
                ]
                changed = [names - those for names, those in zip(changed, of_state, strict=True)]
                kept.add(index, part, before, of_state, "the optimizer's state depends on it")
                renamed += _renamed(index, part, before)
            if any(changed):
                why = part.apply(changed)
                (new if why is None else kept).add(index, part, before, changed, why or "")
        if not why_all:
            not_kept += [f"{each}, because it has not changed" for each in keep if each in unused]
        return RestoredSettings(new.lines(), kept.lines() + renamed, not_kept=not_kept)

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

    Another size of batches is told, or refused, by `Loaders.count_on`.
    """
    before = saved.data
    differing = [each for each in now if each in _differing(now, before) - {"batch size"}]
    told = (f"{each} {' -> '.join(told_apart(before[each], now[each]))}" for each in differing)
    text = ", ".join(told)
    return [f"training data: {text}, also for the rest of this epoch"] if text else []


def read_settings(folder: Path) -> SavedSettings | None:
    """Read what `BuiltSettings.write` wrote in a folder of a checkpoint; None if it has none."""
    return read_resume_file(folder, SavedSettings)


def read_parameters(folder: Path) -> list[list[str]]:
    """The names of each optimizer's parameters in a folder of a checkpoint, if they are known."""
    saved = read_settings(folder)
    return [each.parameters for each in saved.parts if each.kind == "optimizer"] if saved else []


def read_resume_file(folder: Path, kind: type[Record]) -> Record | None:
    """Read the `FILE` in a folder of a checkpoint; None if it has none.

    Raises:
        CheckpointError: it is not of that kind.
    """
    try:
        return convert(json.loads((folder / FILE).read_bytes()), kind)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"the checkpoint's {FILE} is not trialflow's: {error}") from error


def _count(kind: str, parts: Iterable[SettingsPart | SavedPart]) -> int:
    return sum(each.kind == kind for each in parts)


def _renamed(index: int, part: SettingsPart, before: SavedPart) -> list[str]:
    """What an optimizer's parameters have got without a state of their name; see `saved_places`."""
    now, then = part.parameters, before.parameters
    places = saved_places(now, then) if len(now) == len(then) else []
    differing = [
        f"{then[place]} for {name}"
        for name, place in zip(now, places, strict=False)
        if then[place] != name
    ]
    text = f"{part.kind} {index} ({part.type}): the state of {clean(first_few(differing, _SHOWN))}"
    return [f"{text}, because the checkpoint has none of that name"] if differing else []


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
