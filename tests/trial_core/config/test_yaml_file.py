"""The limits of an experiment file. `test_experiment` has what a file may say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trial_core.config.yaml_file import MAX_CHARACTERS, MAX_VALUES, merged, parse_yaml, read_mapping
from trial_core.errors import ConfigError


def aliases(levels: int, copies: int = 9) -> str:
    """A few lines that stand for ``copies ** levels`` values."""
    lines = ["a0: &a0 [x]"]
    for i in range(1, levels + 1):
        lines.append(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * copies)}]")
    return "\n".join(lines)


def test_a_file_of_aliases_is_refused_before_it_is_written_out() -> None:
    """It would take seconds a level. Few aliases are welcome."""
    with pytest.raises(
        ConfigError, match=f"^file: not valid YAML at line .* more than {MAX_VALUES} values"
    ):
        parse_yaml(aliases(300), "file")
    assert parse_yaml(aliases(2), "file")["a2"] == [[["x"]] * 9] * 9


def test_merge_keys_count_like_aliases() -> None:
    """Each merge copies all keys of the mapping."""
    lines = ["a0: &a0 {x: [1, 2]}"]
    lines += [f"a{i}: &a{i} {{b: *a{i - 1}, c: *a{i - 1}, <<: *a{i - 1}}}" for i in range(1, 40)]
    with pytest.raises(ConfigError, match="more than"):
        parse_yaml("\n".join(lines), "file")


@pytest.mark.parametrize(
    "text",
    ["[" * 101 + "]" * 101, "[" * 5000, aliases(100, copies=1)],
    ids=["collections", "an open end", "aliases"],
)
def test_a_deeply_nested_file_is_refused(text: str) -> None:
    """What cannot be stored as JSON later is refused at once."""
    with pytest.raises(ConfigError, match=r"(more than 100 levels|nested too deeply)"):
        parse_yaml(text, "file")


def test_a_collection_that_contains_itself_is_refused() -> None:
    """It has no end."""
    with pytest.raises(ConfigError, match=r"^file: not valid YAML at line 1.* recursive"):
        parse_yaml("a: &a [*a]", "file")


def test_a_large_file_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    """The message says where large data belongs."""
    path = tmp_path / "experiment.yaml"
    path.write_text("x" * (MAX_CHARACTERS + 1))
    with pytest.raises(ConfigError, match=f"more than {MAX_CHARACTERS} characters; put large data"):
        read_mapping(path)


@pytest.mark.parametrize(
    ("base", "changes", "expected"),
    [
        ({"a": 1, "b": 2}, {"b": 3}, {"a": 1, "b": 3}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"c": 3, "d": 4}}, {"a": {"b": 1, "c": 3, "d": 4}}),
        ({"a": {"b": 1}}, {"a": 2}, {"a": 2}),
        ({"a": 2}, {"a": {"b": 1}}, {"a": {"b": 1}}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
    ],
)
def test_mappings_are_merged(base: Any, changes: Any, expected: Any) -> None:
    """At every depth; other values are replaced; the arguments are not changed."""
    before = repr((base, changes))
    assert merged(base, changes) == expected
    assert repr((base, changes)) == before
