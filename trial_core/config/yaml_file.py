"""Reading the experiment file, and overriding parts of it.

Plain scalars follow YAML 1.2, as in Determined: ``1e-5`` is a number, ``no`` and
``2024-01-01`` are text. A duplicate key is an error; YAML libraries silently use the last one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from trial_core.config.error_text import did_you_mean, format_value, warn
from trial_core.config.values import MAX_LEVELS, is_unicode
from trial_core.errors import ConfigError

_LENGTHS = (("searcher", "max_length"), ("min_validation_period",), ("min_checkpoint_period",))
_UNITS = ("batches", "epochs", "records")


MAX_CHARACTERS = 2**20
"""The size limit of an experiment file. The parser needs some ten seconds for as much."""

MAX_VALUES = 100_000
"""Values in a file, its aliases written out: a few lines of aliases may stand for billions."""


class _Loader(yaml.SafeLoader):
    """Reads plain data only, with the plain scalars of YAML 1.2."""

    def get_single_node(self) -> Node | None:
        node = super().get_single_node()
        if node is not None:
            _measure(node, {})
        return node

    def compose_mapping_node(self, anchor: Any) -> MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, ScalarNode):
                if key.value in seen:
                    problem = f'the key "{key.value}" is given twice'
                    raise ConstructorError(None, None, problem, key.start_mark)
                seen.add(key.value)
        return node


def _measure(node: Node, measured: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """The number of values in `node`, and of its levels, with its aliases written out. An alias is
    the node that it stands for, which `measured` may have."""
    if id(node) in measured:
        return measured[id(node)]
    if isinstance(node, ScalarNode) and not is_unicode(node.value):
        problem = f"{format_value(node.value)} has a character that UTF-8 cannot encode"
        raise ConstructorError(None, None, problem, node.start_mark)
    measured[id(node)] = 1, 1  # a collection that contains itself is refused later
    parts = node.value if isinstance(node, (SequenceNode, MappingNode)) else []
    if isinstance(node, MappingNode):
        parts = [part for pair in parts for part in pair]
    sizes = [_measure(part, measured) for part in parts]
    values = 1 + sum(size[0] for size in sizes)
    levels = 1 + max((size[1] for size in sizes), default=0)
    for seen, limit, what in ((values, MAX_VALUES, "values"), (levels, MAX_LEVELS, "levels")):
        if seen > limit:
            problem = f"more than {limit} {what}, with aliases written out"
            raise ConstructorError(None, None, problem, node.start_mark)
    measured[id(node)] = values, levels
    return values, levels


_Loader.yaml_implicit_resolvers = {}  # drops the scalars of YAML 1.1; YAML 1.2's follow below
_Loader.yaml_constructors = {None: yaml.SafeLoader.construct_undefined}


def _integer(text: str) -> int:
    digits = text.replace("_", "")
    return int(digits, 0 if digits[:2] in ("0x", "0o") else 10)


def _float(text: str) -> float:
    return float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))


def _add_scalar(name: str, pattern: str, first: str, convert: Callable[[str], Any]) -> None:
    """Have the loader read plain scalars that match `pattern` with `convert`."""

    def construct(loader: _Loader, node: Any) -> Any:
        text = loader.construct_scalar(node)
        try:
            return convert(text)
        except (ValueError, KeyError):  # an explicit tag, such as `!!int ten`
            problem = f"{format_value(text)} is no {name}"
            raise ConstructorError(None, None, problem, node.start_mark) from None

    tag = f"tag:yaml.org,2002:{name}"
    _Loader.add_implicit_resolver(tag, re.compile(rf"^(?:{pattern})$"), list(first) or [""])
    _Loader.add_constructor(tag, construct)


_BOOLS = {"true": True, "false": False}
_add_scalar("bool", "true|True|TRUE|false|False|FALSE", "tTfF", lambda text: _BOOLS[text.lower()])
_add_scalar("null", "~|null|Null|NULL", "~nN", lambda _: None)
_add_scalar("null", "", "", lambda _: None)
_add_scalar("int", r"[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789", _integer)
_add_scalar(
    "float",
    r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    "-+.0123456789",
    _float,
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile("^<<$"), ["<"])


_CONSTRUCTORS: dict[str, Callable[[_Loader, Any], Any]] = {
    # Not lazily like SafeLoader: a collection that contains itself is then an error.
    "map": lambda loader, node: loader.construct_mapping(node, deep=True),
    "seq": lambda loader, node: loader.construct_sequence(node, deep=True),
    "str": lambda loader, node: str(loader.construct_scalar(node)),
}
for _name, _construct in _CONSTRUCTORS.items():
    _Loader.add_constructor(f"tag:yaml.org,2002:{_name}", _construct)


def parse_yaml(text: str, source: str) -> Any:
    """The plain data in `text`. ConfigError if that is not valid YAML, or too much; the message has
    `source`, line and column."""
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(
            f"{source}: more than {MAX_CHARACTERS} characters; put large data into a file of its "
            "own, and name that file here"
        )
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{source}: {_yaml_error_message(error)}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{source}: not valid YAML: nested too deeply") from None
    except (ValueError, OverflowError) as error:  # an escape such as "\\UFFFFFFFF"
        raise ConfigError(f"{source}: not valid YAML: {error}") from None


def _yaml_error_message(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    problem = ", ".join(part for part in (error.context, error.problem) if part)
    tabs = " (indent with spaces, not tabs)" if "'\\t'" in problem else ""
    return f"not valid YAML{place}: {problem}{tabs}"


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. ConfigError if the file cannot be read, or is not a YAML
    mapping."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file{_similar_file_hint(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder; give the YAML file in it") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file in UTF-8") from None
    except ValueError:  # a NUL character
        raise ConfigError(f"{format_value(str(path))} is not a valid path") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    data = parse_yaml(text, str(path))
    if data is None:
        raise ConfigError(f"{path}: is empty; expected fields such as entrypoint and searcher")
    if not isinstance(data, dict):
        raise ConfigError(
            f"{path}: expected a mapping of fields such as entrypoint and searcher, "
            f"got {format_value(data)}"
        )
    return data


def _similar_file_hint(path: Path) -> str:
    try:
        names = os.listdir(path.parent)
    except OSError:
        return ""
    near = get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""


def override(
    mapping: Mapping[str, Any], overrides: Sequence[str], option: str = "--set"
) -> dict[str, Any]:
    """`mapping` with each ``"a.b.c=value"`` applied in turn; the value is YAML.

    Missing mappings on the path are created. Setting a length's unit replaces the whole length, so
    ``searcher.max_length.epochs=1`` works whatever unit the file uses.

    Args:
        option: the option's name, for errors.

    Raises:
        ConfigError: an override has no key or value, or its path leads through a non-mapping.
    """
    result = dict(mapping)
    for text in overrides:
        if not is_unicode(text):
            raise ConfigError(
                f"{option} {format_value(text)}: has a character that UTF-8 cannot encode"
            )
        name, equals, value = text.partition("=")
        path = tuple(name.strip().split("."))
        if not equals or not all(path):
            raise ConfigError(
                f"{option} {text if not equals else name}: expected key=value, "
                "such as searcher.max_length.batches=20"
            )
        if len(path) > MAX_LEVELS:
            raise ConfigError(f"{option} {name[:60]}…: the key has more than {MAX_LEVELS} parts")
        result = _with(result, path, parse_yaml(value, f"{option} {name}"), (), option)
    return result


def override_values(mapping: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """`mapping` with each ``{"a.b.c": value}`` applied in turn, as `override` does. ConfigError
    also if a text cannot be encoded."""
    result = dict(mapping)
    for name, value in values.items():
        path = tuple(part.strip() for part in name.split(".")) if isinstance(name, str) else ()
        if not path or not all(path) or len(path) > MAX_LEVELS:
            raise ConfigError(
                f"overrides: {format_value(name)}: expected a path with dots, such as "
                "searcher.max_length.batches"
            )
        if isinstance(value, str) and not is_unicode(value):
            raise ConfigError(f"overrides: {name}: has a character that UTF-8 cannot encode")
        result = _with(result, path, value, (), "overrides:")
    return result


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `changes`. Nested mappings are merged."""
    result = dict(base)
    for key, value in changes.items():
        existing = result.get(key)
        if isinstance(existing, Mapping) and isinstance(value, Mapping):
            result[key] = merged(existing, value)
        else:
            result[key] = value
    return result


def warn_of_new_hyperparameters(mapping: Mapping[str, Any], overrides: Iterable[str]) -> None:
    """Warn of every hyperparameter that an override adds to `mapping`, the file without them. The
    overrides must be well-formed."""
    for text in overrides:
        path = text.partition("=")[0].strip().split(".")
        section: Any = mapping.get(path[0]) if path[0] == "hyperparameters" else None
        for depth, name in enumerate(path[1:], 1):
            if not isinstance(section, Mapping) or not section:
                break
            if name not in section:
                near = did_you_mean(name, [*map(str, section)])
                warn(
                    f"--set {'.'.join(path[: depth + 1])}: the file has no such hyperparameter, so "
                    f"it has no effect unless the trial reads it{near}"
                )
                break
            section = section[name]


def _with(
    mapping: Mapping[str, Any],
    path: tuple[str, ...],
    value: Any,
    parents: tuple[str, ...],
    option: str,
) -> dict[str, Any]:
    """A copy with `value` at `path`. A copy, because a YAML alias may share the mapping."""
    name, rest = path[0], path[1:]
    if not rest:
        return {**mapping, name: value}
    here = (*parents, name)
    inner = mapping.get(name)
    if inner is None or (here in _LENGTHS and rest[0] in _UNITS):
        inner = {}
    if not isinstance(inner, Mapping):
        raise ConfigError(
            f"{option} {'.'.join((*parents, *path))}: {'.'.join(here)} is not a mapping, so "
            f"{rest[0]} cannot be set in it"
        )
    return {**mapping, name: _with(inner, rest, value, here, option)}
