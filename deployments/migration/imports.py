"""Changes the imports of Determined in a source file; all other text stays as it is."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence

import libcst as cst
from libcst.helpers import get_full_name_for_node
from libcst.metadata import (
    MetadataWrapper,
    PositionProvider,
    QualifiedNameProvider,
    QualifiedNameSource,
)

from trialflow.deployments.migration.findings import Finding, Migrated

_OLD, _NEW = "determined", "trial_core"
_MOVED = {f"{_OLD}.pytorch.deepspeed": f"{_NEW}.deepspeed", _OLD: _NEW}
"""Where the names below a module are; the first one that fits counts."""
_MODULE_IN_TEXT = re.compile(rf"{_OLD}(\.[A-Za-z_]\w*)+")


def migrate_source(source: bytes) -> Migrated:
    """A Python source file with trialflow's imports.

    Raises:
        libcst.ParserSyntaxError: it is not valid Python.
        UnicodeDecodeError: it is not text in its encoding.
    """
    wrapper = MetadataWrapper(cst.parse_module(source))
    imports = _Imports()
    moved = wrapper.visit(imports)
    return Migrated(moved.bytes, sorted(set(imports.findings)))


def advice(name: str) -> str | None:
    """What to use instead of a dotted name of Determined; None: the name exists here.

    The advice is that of the error which trialflow raises for the name.
    """
    found: object = importlib.import_module(_NEW)
    path = _moved(name).split(".")
    for i, part in enumerate(path[1:], 1):
        if not isinstance(found, type) and i == len(path) - 1 and part in dir(found):
            return None  # without an import of what it is, which may need torch
        try:
            found = getattr(found, part)
        except AttributeError as error:
            try:
                found = importlib.import_module(".".join(path[: i + 1]))
            except ModuleNotFoundError:
                return str(error).partition("; ")[2] or "it has no counterpart"
        if not isinstance(found, type) and not hasattr(found, "__path__"):
            return None  # the attributes of an object are not known before a run
    return None


class _Imports(cst.CSTTransformer):
    """Changes the imports and the names that they bind, and collects what has no counterpart."""

    METADATA_DEPENDENCIES = (PositionProvider, QualifiedNameProvider)

    def __init__(self) -> None:
        super().__init__()
        self.findings: list[Finding] = []
        self._parts: set[cst.CSTNode] = set()
        """Attributes and names inside an attribute: ``det.core`` in ``det.core.init``."""

    def visit_Import(self, node: cst.Import) -> bool:
        return False  # its names are no uses

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
        if original_node.relative or not module or not _is_determined(module):
            return updated_node
        if not self._exists(module, original_node):
            return updated_node
        names = original_node.names
        if not isinstance(names, cst.ImportStar):
            exist = [self._exists(f"{module}.{each.evaluated_name}", each) for each in names]
            if not any(exist):
                return updated_node
        return updated_node.with_changes(module=cst.parse_expression(_moved(module)))

    def visit_Attribute(self, node: cst.Attribute) -> None:
        self._parts.update((node.value, node.attr))
        if node in self._parts or not _is_dotted(node):
            return
        for name in self._imported(node):
            self._exists(name, node)

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.Attribute:
        return updated_node.with_changes(attr=original_node.attr)

    def leave_Arg(self, original_node: cst.Arg, updated_node: cst.Arg) -> cst.Arg:
        return updated_node.with_changes(keyword=original_node.keyword)

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.Name:
        if original_node.value == _OLD and _OLD in self._imported(original_node):
            return updated_node.with_changes(value=_NEW)
        return updated_node

    def visit_SimpleString(self, node: cst.SimpleString) -> None:
        text = node.evaluated_value
        if isinstance(text, str) and _MODULE_IN_TEXT.fullmatch(text):
            self._exists(text, node, "the text {}")

    def _imported(self, node: cst.CSTNode) -> Sequence[str]:
        """The names of Determined that a name in the source stands for."""
        found = self.get_metadata(QualifiedNameProvider, node, set())
        return sorted(
            each.name
            for each in found
            if each.source is QualifiedNameSource.IMPORT and _is_determined(each.name)
        )

    def _exists(self, name: str, node: cst.CSTNode, form: str = "{}") -> bool:
        """Whether trialflow has a name; if not, it becomes a finding."""
        instead = advice(name)
        if instead is not None or form != "{}":
            line = self.get_metadata(PositionProvider, node).start.line
            text = instead or f"replace it by {_moved(name)}"
            self.findings.append(Finding(line, f"{form.format(name)}: {text}"))
        return instead is None


def _is_determined(name: str) -> bool:
    return name == _OLD or name.startswith(f"{_OLD}.")


def _is_dotted(node: cst.CSTNode) -> bool:
    """Whether a node is a name, or an attribute of names alone."""
    while isinstance(node, cst.Attribute):
        node = node.value
    return isinstance(node, cst.Name)


def _moved(name: str) -> str:
    """The name in trialflow of a name of Determined, whether it exists or not."""
    for old, new in _MOVED.items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return name
