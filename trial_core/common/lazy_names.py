"""Names of a package that are imported on first use (PEP 562), so that importing it is cheap."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from trial_core.common.unknown_names import unknown_name

SAID_AFTER_SECONDS = 2.0
_OUR_PROGRAMS = ("trial_core", "trialflow", "pytest")
_importing: list[str] = []


def lazy_names(
    package: str, names: Sequence[str], homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's ``__getattr__`` and ``__dir__``. `homes` has a name's module, or ``module:name``
    if it has another name there. Names without a home are the package's own modules."""

    def get(name: str) -> Any:
        if name not in names:
            raise unknown_name(package, name, names)
        module, _, there = homes.get(name, "").partition(":")
        full = module or f"{package}.{name}"
        with nullcontext() if full in sys.modules else _said_if_long(package):
            found = importlib.import_module(full)
        return getattr(found, there or name) if module else found

    return get, lambda: sorted({*vars(sys.modules[package]), *names})


@contextmanager
def _said_if_long(package: str) -> Iterator[None]:
    """Tell the person who has started a script what it waits for, if that takes seconds."""
    if _importing or not _is_first_of_script():
        yield
        return

    def say() -> None:
        print(f"importing {package} and the libraries that it needs…", file=sys.stderr, flush=True)

    timer = threading.Timer(SAID_AFTER_SECONDS, say)
    timer.daemon = True
    _importing.append(package)
    try:
        with suppress(RuntimeError):  # no thread begins while the interpreter ends
            timer.start()
        yield
    finally:
        timer.cancel()
        _importing.clear()


def _is_first_of_script() -> bool:
    """Return whether this is rank 0 of a person's own script, not one of our processes."""
    if os.environ.get("RANK", "0") != "0":
        return False
    main = sys.modules.get("__main__")
    if (spec := getattr(main, "__spec__", None)) is not None:  # python -m
        return spec.name.partition(".")[0] not in _OUR_PROGRAMS
    file = getattr(main, "__file__", None)  # none in a console, and with -c
    return file is not None and not Path(file).absolute().is_relative_to(sys.prefix)
