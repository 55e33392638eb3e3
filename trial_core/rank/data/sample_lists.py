"""Digests of the lists by which a dataset finds its samples.

Seed and epoch decide the order of indices. The dataset decides which sample an index is. Names from
``os.listdir``, an unsorted glob or a set may have another order on another machine or in another
attempt, and a random split without a seed has other indices. Ranks then train on some samples
twice in an epoch, and never on others.

No sample is read. Reading one may be slow or random, or have an effect, as with a file that each
loader worker has to open itself. Compared are the lists that most datasets keep: of names, labels
and indices. Floats are not, because machines may compute them with other last bits. The folder that
all paths of a list have in common is left out: each machine may have the data elsewhere.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from trial_core.common.text_format import clean, first_few
from trial_core.rank.data.seekable_samplers import length_of

_FIRST, _SPREAD = 16, 48
"""How many entries of a list are read: the first ones, and others from all over it."""

_PARTS, _LISTS, _LEAVES = 16, 32, 64
"""The maximum number of datasets and samplers, of lists, and of values in an entry."""

_CHARACTERS = 4096

_NUMBERED_NAMES = 10_000
"""A longer dictionary of names is not read."""

SampleLists = Mapping[str, str]
"""Digests by name: ``Pictures.names``, or ``len(Pictures)``."""


def sample_lists(loader: Any) -> SampleLists:
    """The digests of the lists that are attributes of a loader's datasets and samplers."""
    found: dict[str, str] = {}
    if (samples := length_of(loader.dataset)) is not None:
        found[f"len({type(loader.dataset).__name__})"] = str(samples)
    for part in itertools.islice(_parts(loader), _PARTS):
        for name, values in _lists(part):
            try:
                digest = _digest(values, part)
            except Exception:  # noqa: BLE001 - a list of the trial's own may hold anything
                continue
            if digest is not None and len(found) < _LISTS:
                found[_unused(f"{type(part).__name__}{name}", found)] = digest
    return found


def differing_ranks(ranks: Sequence[SampleLists | None], which: str) -> str | None:
    """A warning if `ranks` (None: without data) have other lists of ``training`` or ``validation``
    data."""
    known = {rank: lists for rank, lists in enumerate(ranks) if lists is not None}
    if not known:
        return None
    first, *others = known
    differing = {rank: _differing(known[first], known[rank]) for rank in others}
    names = dict.fromkeys(name for found in differing.values() for name in found)
    if not names:
        return None
    where = first_few([str(rank) for rank, found in differing.items() if found])
    return (
        f"the {which} data are not the same on all ranks: rank {first} has "
        f"{_told(names)} with other entries or in another order than rank {where}. "
        f"{_EFFECT_AND_REMEDY}"
    )


def differing_checkpoint(saved: SampleLists, now: SampleLists) -> str | None:
    """A warning if a checkpoint was saved with other lists."""
    names = _differing(saved, now)
    if not names:
        return None
    return (
        f"the training data are not those of the checkpoint: {_told(names)} had other entries or "
        f"another order when it was saved. {_EFFECT_AND_REMEDY}"
    )


_EFFECT_AND_REMEDY = (
    "So samples may come twice or never in this epoch, or have other labels. Sort what "
    "os.listdir, a glob or a set gives, and give a random split a generator with a seed; "
    "reproducibility.compare_data=false turns this comparison off"
)


def _told(names: Collection[str]) -> str:
    return clean(first_few(names))


def _differing(one: SampleLists, other: SampleLists) -> list[str]:
    return [name for name in one if name in other and one[name] != other[name]]


def _unused(name: str, used: Mapping[str, str]) -> str:
    """``Pictures.names (2)`` for the same list of a second dataset."""
    numbered = (name if i == 1 else f"{name} ({i})" for i in itertools.count(1))
    return next(each for each in numbered if each not in used)


def _parts(loader: Any) -> Iterator[Any]:
    """The loader's samplers and its dataset, with the datasets in it."""
    batch_sampler = loader.batch_sampler
    own = _attributes(batch_sampler).get("sampler")
    pending = [loader.sampler, batch_sampler, own, loader.dataset]
    seen: set[int] = set()
    while pending:
        part = pending.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        within = _attributes(part)
        inner, several = [within.get("dataset")], within.get("datasets")
        if isinstance(several, (list, tuple)):  # of a ConcatDataset
            inner += several[:_PARTS]
        pending += [each for each in reversed(inner) if isinstance(each, Dataset)]


def _attributes(part: Any) -> Mapping[str, Any]:
    """The attributes of an object itself: no property is computed."""
    own = getattr(part, "__dict__", None)
    return own if type(own) is dict else {}


def _lists(part: Any) -> Iterator[tuple[str, Any]]:
    """All lists of a dataset or sampler, with the end of their names."""
    if _is_list(part):
        yield "", part
    for name, value in [*_attributes(part).items()]:
        if type(value) in (list, tuple) and 0 < len(value) <= _LISTS and all(map(_is_array, value)):
            yield from ((f".{name}[{i}]", each) for i, each in enumerate(value))
        elif _is_list(value):
            yield f".{name}", value
        elif type(value) is dict and _numbers_names(value):
            yield f".{name}", sorted(value, key=value.__getitem__)


def _is_list(value: Any) -> bool:
    return type(value) in (list, tuple) or _is_array(value) or _is_of_pandas(value)


def _is_array(value: Any) -> bool:
    """True for an array or tensor in memory that is not of floats."""
    if type(value) is torch.Tensor:
        is_plain = value.device.type == "cpu" and value.layout == torch.strided
        return is_plain and not (value.is_floating_point() or value.is_complex())
    return type(value) is np.ndarray and value.dtype.kind in "biuSUO"


def _is_of_pandas(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "pandas" and hasattr(value, "iloc")


def _numbers_names(value: dict[Any, Any]) -> bool:
    """True for names with the numbers from 0 on, such as ``class_to_idx``."""
    return (
        len(value) <= _NUMBERED_NAMES
        and all(type(name) is str for name in value)
        and all(type(number) is int for number in value.values())
        and sorted(value.values()) == [*range(len(value))]
    )


def _digest(values: Any, part: Any) -> str | None:
    """None for a list that does not tell samples apart: numbers, unless each sample has one."""
    count = len(values)
    if count < 2:
        return None
    spread = (i * count // _SPREAD for i in range(_SPREAD))
    columns: dict[str, list[str | int]] = defaultdict(list)
    for entry in _entries(values, sorted({*range(min(count, _FIRST)), *spread})):
        for place, leaf in itertools.islice(_leaves(entry), _LEAVES):
            columns[place].append(leaf)
    has_text = any(isinstance(leaf, str) for column in columns.values() for leaf in column)
    if not columns or not (has_text or count == length_of(part)):
        return None
    content = [count, sorted((place, _without_folder(each)) for place, each in columns.items())]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _entries(values: Any, places: list[int]) -> list[Any]:
    if _is_of_pandas(values):
        chosen = values.iloc[places]
        return list(chosen.to_dict("records") if chosen.ndim == 2 else chosen)
    if _is_array(values):
        chosen = values[places]
        return list(chosen.reshape(len(places), -1)[:, :_LEAVES].tolist())
    return [values[i] for i in places]


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, str | int]]:
    """The texts and whole numbers in an entry, with their places in it."""
    if isinstance(value, (bool, int, np.integer)):
        yield place, int(value)
    elif isinstance(value, (str, PurePath)):
        yield place, str(value)
    elif isinstance(value, bytes):
        yield place, value[:_CHARACTERS].hex()
    elif place.count("/") < 3:  # it may contain itself
        if type(value) in (list, tuple):
            for i, each in enumerate(value[:_LEAVES]):
                yield from _leaves(each, f"{place}/{i}")
        elif type(value) is dict:
            for name, each in itertools.islice(value.items(), _LEAVES):
                yield from _leaves(each, f"{place}/{name}")


def _without_folder(column: list[str | int]) -> list[str | int]:
    """Without the folder that all texts of it begin with, which need not be paths."""
    texts = [each for each in column if isinstance(each, str)]
    if not texts:
        return column
    low, high = min(texts), max(texts)
    common = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))
    cut = max(low.rfind("/", 0, common), low.rfind("\\", 0, common)) + 1
    return [each[cut : cut + _CHARACTERS] if isinstance(each, str) else each for each in column]
