"""Fixtures that several tests share. Servers and warm ranks start once a session."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import hypothesis
import hypothesis.configuration
import pytest

# Before anything imports deepspeed or prefect: tests use CPU ranks and no network.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
os.environ["DO_NOT_TRACK"] = "1"
# A shell starts background jobs with SIGINT ignored, and commands under test would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Examples are the same each time, are not stored, and have no deadline: machines are busy.
# hypothesis keeps its tables of characters out of the repository.
hypothesis.settings.register_profile(
    "trialflow",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("trialflow")
hypothesis.configuration.set_hypothesis_home_dir(
    Path(tempfile.gettempdir(), f"hypothesis-{os.getuid()}")
)

FLOWS = ("flows", "deployments")
"""Groups of tests with a Prefect server; each starts its own."""

pytest_plugins = [
    "tests.support.s3",
    "tests.support.slots",
    "tests.support.prefect",
    "tests.support.ray",
    "tests.support.flow",
    "tests.support.faults.scene",
    "tests.support.stores",
    "tests.support.wire",
    "tests.support.slurm",
    "tests.support.engines",
]


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group tests that share servers or warm ranks: one process of xdist runs a group.

    A process that has run a Prefect flow keeps exit hooks of its threads, and the forked workers of
    a data loader fail in them. So in one process flows come last. With several processes the first
    one begins with flows, the second one with loaders, the third one with deployments.
    """
    here = Path(__file__).parent
    for item in items:
        if group := _group(item, item.path.relative_to(here)):
            item.add_marker(pytest.mark.xdist_group(group))
    others = {*map(_group_of, items)} - {*FLOWS, "loaders", ""}
    order = ["loaders", *sorted(others), "", *FLOWS]
    if "PYTEST_XDIST_WORKER" in os.environ:
        order = [FLOWS[0], "loaders", *FLOWS[1:], *sorted(others), ""]
    items.sort(key=lambda item: order.index(_group_of(item)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fail if xdist does not see the groups: every process would start every server."""
    if getattr(session.config.option, "loadgroup", False):
        for item in session.items:
            if _group_of(item) and "@" not in item.nodeid:
                raise pytest.UsageError(f"xdist does not see the group of {item.nodeid}")


def _group(item: pytest.Item, path: Path) -> str:
    """The group of a test; empty: none."""
    if item.get_closest_marker("server"):
        return "flows" if path.parts[0] == "flows" else "deployments"
    if item.get_closest_marker("gateway"):
        return "gateway"
    if item.get_closest_marker("slots"):
        return "ranks"
    if item.get_closest_marker("ray"):
        return "ray"
    if path.parts[:2] == ("trial_core", "pytorch"):
        return "loaders"
    return ""


def _group_of(item: pytest.Item) -> str:
    marker = item.get_closest_marker("xdist_group")
    return str(marker.args[0]) if marker else ""
