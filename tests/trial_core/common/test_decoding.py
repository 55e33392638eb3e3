"""Types are decoded in any number of threads."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from trial_core.common.decoding import decode
from trial_core.common.python_source import without_collections

ROOT = Path(__file__).parents[3]

TYPES = """
from __future__ import annotations
import dataclasses

@dataclasses.dataclass(frozen=True)
class Inner:
    text: str | None

@dataclasses.dataclass(frozen=True)
class Outer:
    one: Inner
    some: list[Inner]
    by_name: dict[str, float | None]
"""
PROGRAM = """
import sys, threading, types
from trial_core.common.decoding import convert

sys.setswitchinterval(1e-6)
FIELDS = {"one": {"text": None}, "some": [{"text": "a"}], "by_name": {"b": 1.0}}
for number in range(200):
    module = sys.modules[f"m{number}"] = types.ModuleType(f"m{number}")
    exec(sys.argv[1], module.__dict__)
    begin = threading.Barrier(6)

    def work():
        begin.wait()
        convert(FIELDS, module.Outer)

    threads = [threading.Thread(target=work) for _ in range(begin.parties)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_a_type_is_first_decoded_in_several_threads() -> None:
    """As when a driver lists its checkpoints. By itself, msgspec would end the process."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, TYPES],
        cwd=ROOT, text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_no_other_module_decodes_types() -> None:
    """Only `trial_core/common/decoding.py` calls `msgspec.convert`, or `decode` with a type."""
    found = set()
    for folder in ("trial_core", "tasks", "flows", "deployments"):
        for path in (ROOT / folder).rglob("*.py"):
            if "msgspec" not in (text := path.read_text()):
                continue
            with without_collections():
                tree = ast.parse(text)
            for node in ast.walk(tree):
                if not isinstance(node, ast.Call):
                    continue
                name = ast.unparse(node.func)
                has_type = any(keyword.arg == "type" for keyword in node.keywords)
                is_typed = name.startswith("msgspec") and has_type
                if is_typed or name in ("msgspec.convert", "msgspec.json.Decoder"):
                    found.add(str(path.relative_to(ROOT)))
    assert found == {"trial_core/common/decoding.py"}


class Plain(msgspec.Struct):
    """It has no fields."""


def test_what_is_nested_too_deeply_is_an_error_like_others() -> None:
    """Also in a field that a type does not have: a stored object ends no run by its depth."""
    deep = b'{"more":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    for kind in (Plain, object):
        with pytest.raises(msgspec.MsgspecError):
            decode(deep, kind)
