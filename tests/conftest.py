"""Fixtures that several tests share. Servers and warm ranks start once a session."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

# Before anything imports deepspeed or prefect: tests run on CPU ranks, and speak to nobody.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
os.environ["DO_NOT_TRACK"] = "1"
# As in an activated environment. Another ninja would have DeepSpeed's op compiled again.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
# A shell starts background jobs with SIGINT ignored, and commands under test would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = [
    "tests.support.s3",
    "tests.support.slots",
    "tests.support.prefect",
    "tests.support.flow",
    "tests.support.faults.scene",
    "tests.support.stores",
]


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What shares servers or warm ranks is a group, which one process of xdist's runs.

    A process that has run a Prefect flow keeps exit hooks of its threads, over which a data
    loader's forked workers stumble. So flows come last; with several processes they are the first
    group, and loaders the second, which another process takes.
    """
    here = Path(__file__).parent
    for item in items:
        if group := _group(item, item.path.relative_to(here)):
            item.add_marker(pytest.mark.xdist_group(group))
    order = ["loaders", *sorted(set(map(_group_of, items)) - {"flows", "loaders", ""}), "", "flows"]
    if "PYTEST_XDIST_WORKER" in os.environ:
        order = ["flows", *order[:-1]]
    items.sort(key=lambda item: order.index(_group_of(item)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Groups that xdist does not see would start every server twice, and nobody would notice."""
    if getattr(session.config.option, "loadgroup", False):
        for item in session.items:
            if _group_of(item) and "@" not in item.nodeid:
                raise pytest.UsageError(f"xdist does not see the group of {item.nodeid}")


def _group(item: pytest.Item, path: Path) -> str:
    """The group that a test belongs to; empty: none."""
    if item.get_closest_marker("server"):
        return "flows"
    if item.get_closest_marker("gateway"):
        return "gateway"
    if path.parts[:2] == ("trial_core", "pytorch"):
        return "loaders"
    if item.get_closest_marker("slots"):
        return "ranks of " + "/".join(path.parts[:-1])
    return ""


def _group_of(item: pytest.Item) -> str:
    marker = item.get_closest_marker("xdist_group")
    return str(marker.args[0]) if marker else ""
