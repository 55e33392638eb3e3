"""Source is read while a garbage collection runs code that reads source, too."""

import ast
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from trial_core.common.python_source import without_collections


@pytest.fixture
def parsing_collections() -> Iterator[None]:
    """Garbage collections that come often and parse."""
    is_parsing = False

    def parse(phase: str, info: dict[str, int]) -> None:
        nonlocal is_parsing
        if phase == "stop" and not is_parsing:
            is_parsing = True
            ast.parse("total = first + second(third.fourth)")
            is_parsing = False

    threshold = gc.get_threshold()
    gc.callbacks.append(parse)
    gc.set_threshold(200)
    yield
    gc.set_threshold(*threshold)
    gc.callbacks.remove(parse)


def test_source_is_read_whatever_a_collection_runs(parsing_collections: None) -> None:
    """In Python 3.11.7, `ast.parse` by itself fails here."""
    source = Path(ast.__file__).read_text()
    for _ in range(20):
        with without_collections():
            ast.parse(source)
    assert gc.isenabled()
