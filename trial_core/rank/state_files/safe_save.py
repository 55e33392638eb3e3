"""Converts a state so that `safe_load` can read it again, or refuses it before it is stored."""

from __future__ import annotations

import io
import operator
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.serialization import get_safe_globals

from trial_core.errors import TrialError
from trial_core.rank.state_files.safe_load import Reader, is_numpys
from trial_core.rank.state_files.stored_arrays import as_plain, is_storable, without_numbers

# Not looked into: they hold nothing that needs trust.
_LEAVES = frozenset(
    (type(None), bool, int, float, complex, str, bytes, bytearray, range, slice,
     torch.dtype, torch.device, torch.Size)
)  # fmt: skip
_PLAIN_MAPPINGS = (dict, OrderedDict, Counter)
_PLAIN_SEQUENCES = (list, tuple)

# What torch.save raises for an object that has no pickle.
_UNPICKLABLE = (pickle.PicklingError, AttributeError, TypeError)

WHAT_TO_SAVE = (
    "Save numbers, text, tensors and arrays instead, in lists and dicts (for a callback, in its "
    "state_dict)"
)

# Where a value is: the key path of its container, and its key or index there.
_KeyPath = tuple[Any, Any] | None


def readable(state: Any, reader: Reader) -> Any:
    """`state` as `reader` can load it again: other mappings and sequences become plain ones.

    An AttrDict becomes a dict, a deque a list, an array a dict that the reader turns back into an
    array. Numbers of numpy's in sets and keys become Python's. Containers in which nothing changes
    are returned themselves. A reader that trusts its files can load any state.

    Raises:
        TrialError: the state holds an object of a class not known to be safe.
    """
    if reader.trusted:
        return state
    conversion = _Conversion(reader)
    converted = conversion.convert(state, None)
    try:
        if not conversion.others or not _unsafe([each for _, each in conversion.others], reader):
            return converted
    except _UNPICKLABLE:
        pass
    raise _refusal(conversion.others, reader)


class _Conversion:
    """Converts containers, and collects the other objects, which need a check, in `others`."""

    def __init__(self, reader: Reader) -> None:
        # Not mappings: their content needs a check, and a defaultdict has a factory.
        types = [each for each in reader.classes if isinstance(each, type)]
        known = [each for each in types if not issubclass(each, Mapping)]
        self._known = _LEAVES.union(known)
        self._allowed = frozenset(get_safe_globals())
        # By id, with the original: another object may get its id once it is gone.
        self._converted: dict[int, tuple[Any, Any]] = {}
        self._begun: set[int] = set()
        self.others: list[tuple[_KeyPath, Any]] = []

    def convert(self, value: Any, key_path: _KeyPath) -> Any:
        kind = type(value)
        if kind in self._known or isinstance(value, torch.Tensor):
            return value
        if is_storable(value):
            return self._once(value, key_path, as_plain)
        is_mapping = isinstance(value, Mapping)
        is_sequence = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
        if kind in self._allowed or not (is_mapping or is_sequence):
            if kind in (set, frozenset):
                value = kind(map(without_numbers, value))
            self.others.append((key_path, value))
            return value
        convert = self._mapping if is_mapping else self._sequence
        return self._once(value, key_path, lambda each: convert(each, key_path))

    def _once(self, value: Any, key_path: _KeyPath, convert: Callable[[Any], Any]) -> Any:
        own = id(value)
        if own in self._begun:  # it holds itself
            self._begun.remove(own)
        if own not in self._converted:  # shared objects stay shared
            self._converted[own] = value, value  # ends the recursion
            self._begun.add(own)
            self._converted[own] = value, convert(value)
            if own in self._begun:
                self._begun.remove(own)
            elif self._converted[own][1] is not value:
                raise TrialError(
                    f"the checkpoint cannot hold {_class(value)} at {_text(key_path)}, which holds "
                    f"itself and has to be converted. {WHAT_TO_SAVE}"
                )
        return self._converted[own][1]

    def _mapping(self, value: Mapping[Any, Any], key_path: _KeyPath) -> Any:
        keys = {key: without_numbers(key) for key in value}
        items = {keys[key]: self.convert(each, (key_path, key)) for key, each in value.items()}
        for key in items:
            if self.convert(key, key_path) is not key:  # it would not be one
                self.others.append((key_path, key))
        if type(value) not in _PLAIN_MAPPINGS:
            return items
        if all(keys[key] is key and items[key] is each for key, each in value.items()):
            return value
        if not isinstance(value, OrderedDict):
            return items
        ordered = OrderedDict(items)
        vars(ordered).update(vars(value))  # a module's state dict has an attribute _metadata
        return ordered

    def _sequence(self, value: Sequence[Any], key_path: _KeyPath) -> Any:
        items = [self.convert(each, (key_path, index)) for index, each in enumerate(value)]
        if type(value) in _PLAIN_SEQUENCES and all(map(operator.is_, items, value)):
            return value
        return tuple(items) if isinstance(value, tuple) else items


def _unsafe(objects: Iterable[Any], reader: Reader) -> list[str]:
    """The classes in `objects` that `reader` does not read. Raises one of `_UNPICKLABLE`."""
    file = io.BytesIO()
    torch.save(list(objects), file)
    file.seek(0)
    return reader.unsafe_classes(file)


def _refusal(others: Iterable[tuple[_KeyPath, Any]], reader: Reader) -> TrialError:
    """The error for the first of `others` that cannot be saved or read."""
    for key_path, each in others:
        try:
            classes = _unsafe([each], reader)
        except _UNPICKLABLE as error:
            return TrialError(
                f"the checkpoint cannot hold an object of {_class(each)} at {_text(key_path)}: "
                f"{error}. {WHAT_TO_SAVE}"
            )
        if classes:
            break
    single = (
        "call torch.serialization.add_safe_globals([…]) in the trial's module to allow single "
        "classes, or "
    )
    if any(map(is_numpys, classes)):  # see `stored_arrays`
        single = ""
    return TrialError(
        f"the checkpoint would hold an object of {', '.join(classes)} at {_text(key_path)}, and no "
        f"run could resume from it: reading such objects can run code. {WHAT_TO_SAVE}. Else "
        f"{single}set checkpointing.trusted: true, which allows all"
    )


def _class(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _text(key_path: _KeyPath) -> str:
    keys: list[str] = []
    while key_path is not None:
        key_path, key = key_path
        keys.insert(0, str(key))
    return ".".join(keys) or "its top"
