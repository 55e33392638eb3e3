"""Changes the imports of Determined in a source file; all other text stays as it is."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import libcst as cst
from libcst.helpers import get_full_name_for_node
from libcst.metadata import (
    MetadataWrapper,
    PositionProvider,
    QualifiedNameProvider,
    QualifiedNameSource,
)

from trial_core.errors import ConfigError

_OLD, _NEW = "determined", "trial_core"
_MOVED = {
    rf"^{_OLD}\.pytorch\.deepspeed\b": f"{_NEW}.deepspeed",
    rf"^{_OLD}\.pytorch\.dsat\b": f"{_NEW}.deepspeed.dsat",
    rf"^{_OLD}\b": _NEW,
}
"""The beginnings of names of Determined, and what takes their place: the first that fits."""
_DOTTED = re.compile(r"[\w.\s]+")
_MODULE_IN_TEXT = re.compile(rf"{_OLD}(\.[A-Za-z_]\w*)+")


@dataclass(frozen=True, order=True)
class Finding:
    """A line that a person has to look at; line 0 stands for the whole file."""

    line: int
    text: str


@dataclass(frozen=True)
class Migrated:
    """A file's new content, which may equal the old, and the lines that could not be changed."""

    content: bytes
    findings: list[Finding]


def migrate_source(path: Path) -> Migrated:
    """Change the imports of a Python file to trialflow's.

    Raises:
        ConfigError: the file is not valid Python.
    """
    source = path.read_bytes()
    if _OLD.encode() not in source:
        return Migrated(source, [])
    try:
        wrapper = MetadataWrapper(cst.parse_module(source))
    except (cst.ParserSyntaxError, SyntaxError, UnicodeDecodeError) as error:
        problem = " ".join(str(getattr(error, "message", error)).split())
        raise ConfigError(f"{path}: not valid Python: {problem}") from None
    imports = _Imports()
    moved = wrapper.visit(imports)
    return Migrated(moved.bytes, sorted(set(imports.findings)))


def advice(name: str) -> str | None:
    """Return what to use instead of a dotted name of Determined; None if the name exists here.

    It is the advice of the error that trialflow raises for the name.
    """
    found: object = importlib.import_module(_NEW)
    path = _moved(name).split(".")
    for i, part in enumerate(path[1:], 1):
        if isinstance(found, ModuleType) and i == len(path) - 1 and part in dir(found):
            return None  # without importing it, which may need torch
        try:
            found = getattr(found, part)
        except AttributeError as error:
            try:
                found = importlib.import_module(".".join(path[: i + 1]))
            except ModuleNotFoundError:
                return str(error).partition("; ")[2] or "it has no counterpart"
        except ImportError:
            return None  # it needs a package that is not installed here
        if not isinstance(found, (type, ModuleType)):
            return None  # the attributes of an object are not known before a run
    return None


class _Imports(cst.CSTTransformer):
    """Changes the imports and the names that they bind, and collects names without counterpart."""

    METADATA_DEPENDENCIES = (PositionProvider, QualifiedNameProvider)

    def __init__(self) -> None:
        super().__init__()
        self.findings: list[Finding] = []
        self._parts: set[cst.CSTNode] = set()
        """Nodes inside an attribute: ``det.core`` in ``det.core.init``."""

    def visit_Import(self, node: cst.Import) -> bool:
        return False  # its names are not uses

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        return False

    def leave_Import(self, original_node: cst.Import, updated_node: cst.Import) -> cst.Import:
        names = [
            alias.with_changes(name=cst.parse_expression(_moved(alias.evaluated_name)))
            if _is_determined(alias.evaluated_name) and self._exists(alias.evaluated_name, alias)
            else alias
            for alias in original_node.names
        ]
        return updated_node.with_changes(names=names)

    def leave_ImportFrom(
        self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom
    ) -> cst.ImportFrom:
        module = get_full_name_for_node(original_node.module) if original_node.module else None
        is_ours = module and not original_node.relative and _is_determined(module)
        if not module or not is_ours or not self._exists(module, original_node):
            return updated_node
        names = original_node.names
        if not isinstance(names, cst.ImportStar):
            exist = [self._exists(f"{module}.{each.evaluated_name}", each) for each in names]
            if not any(exist):
                return updated_node
        return updated_node.with_changes(module=cst.parse_expression(_moved(module)))

    def visit_Attribute(self, node: cst.Attribute) -> None:
        self._parts.add(node.value)
        if node not in self._parts and _DOTTED.fullmatch(cst.Module([]).code_for_node(node)):
            for name in self._imported(node):
                self._exists(name, node)

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.Name:
        if original_node.value == _OLD and _OLD in self._imported(original_node):
            return updated_node.with_changes(value=_NEW)
        return updated_node

    def visit_SimpleString(self, node: cst.SimpleString) -> None:
        text = node.evaluated_value
        if isinstance(text, str) and _MODULE_IN_TEXT.fullmatch(text):
            self._note(node, f"the text {text}: {advice(text) or f'write {_moved(text)}'}")

    def _imported(self, node: cst.CSTNode) -> Sequence[str]:
        """Return the names of Determined that a name in the source stands for."""
        found = self.get_metadata(QualifiedNameProvider, node, set())
        return sorted(
            each.name
            for each in found
            if each.source is QualifiedNameSource.IMPORT and _is_determined(each.name)
        )

    def _exists(self, name: str, node: cst.CSTNode) -> bool:
        """Return whether trialflow has a name; if not, it becomes a finding."""
        if (instead := advice(name)) is not None:
            self._note(node, f"{name}: {instead}")
        return instead is None

    def _note(self, node: cst.CSTNode, text: str) -> None:
        line = self.get_metadata(PositionProvider, node).start.line
        self.findings.append(Finding(line, text))


def _is_determined(name: str) -> bool:
    return name == _OLD or name.startswith(f"{_OLD}.")


def _moved(name: str) -> str:
    """Return trialflow's name for a name of Determined, whether it exists or not."""
    pattern, place = next(each for each in _MOVED.items() if re.match(each[0], name))
    return re.sub(pattern, place, name)
