"""Names of a package that are imported on first use (PEP 562), so that importing it is cheap."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trial_core.common.unknown_names import unknown_name


def lazy_names(
    package: str, names: Sequence[str], homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's ``__getattr__`` and ``__dir__``.

    Args:
        homes: for each name its module, or ``module:name`` if it has another name there. Names
            without a home are the package's own modules.
    """

    def get(name: str) -> Any:
        if name not in names:
            raise unknown_name(package, name, names)
        module, _, there = homes.get(name, "").partition(":")
        if module:
            return getattr(importlib.import_module(module), there or name)
        return importlib.import_module(f"{package}.{name}")

    return get, lambda: sorted({*vars(sys.modules[package]), *names})
