"""Which lines of the product a simulation has reached."""

from __future__ import annotations

import dis
import sys
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

ROOT = Path(__file__).parents[2]
ROOMS = {
    "commit": (),
    "fencing": (),
    "intents": (),
    "references": (),
    "storage_mark": (),
    "retention/deletion_markers": (),
    "retention/pruning": ("experiments", "freed_bytes", "rows"),
    "retention/leftovers": ("row", "freed_bytes"),
    "retention/shared_files": (),
}
"""Modules of `trial_core.checkpoint`, and their functions that only show something."""


class Reach:
    """Records lines within its block. Costs little: a function is traced until all are reached."""

    def __init__(self) -> None:
        self._left: dict[CodeType, set[int]] = {}
        self._lines: dict[tuple[str, int], str] = {}
        self._files: dict[str, list[str]] = {}
        self._seen: set[tuple[str, int]] = set()
        for room, shown in ROOMS.items():
            path = ROOT / "trial_core" / "checkpoint" / f"{room}.py"
            text = path.read_text()
            self._files[str(path)] = text.splitlines()
            for code in _functions(compile(text, str(path), "exec")):
                if code.co_name in shown or code.co_name.startswith(("__str", "__repr")):
                    continue
                for line in _lines(code):
                    self._lines[(str(path), line)] = self._files[str(path)][line - 1].strip()

    def __enter__(self) -> Reach:
        sys.settrace(self._call)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        sys.settrace(None)

    def missed(self) -> list[str]:
        """The lines that were not reached: ``file:line: text``."""
        left = self._lines.keys() - self._seen
        return [
            f"{Path(path).name}:{line}: {self._lines[path, line]}" for path, line in sorted(left)
        ]

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if code.co_filename not in self._files:
            return None
        left = self._left.get(code)
        if left is None:
            left = self._left[code] = _lines(code)
        return self._line if left else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        code, line = frame.f_code, frame.f_lineno
        self._left[code].discard(line)
        self._seen.add((code.co_filename, line))
        return self._line


def _functions(code: CodeType) -> list[CodeType]:
    """All functions in a module or a class, and in functions."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    own = [each for each in inner if each.co_flags & 0x2 and not each.co_name.startswith("<")]
    return own + [deeper for each in inner for deeper in _functions(each)]


def _lines(code: CodeType) -> set[int]:
    """The lines that run in a function."""
    return {line for _, line in dis.findlinestarts(code) if line and line != code.co_firstlineno}
