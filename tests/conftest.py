"""Fixtures that several tests share. Servers and warm ranks start once a session."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import threading
from pathlib import Path

import hypothesis
import hypothesis.configuration
import pytest

# Collecting the tests makes much and frees nothing; `pytest_collection_finish` turns it on again.
gc.disable()
# Before anything imports deepspeed or prefect: tests use CPU ranks and no network.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
collect_ignore = [] if os.environ["DS_ACCELERATOR"] == "cuda" else ["gpu"]
os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
os.environ["DO_NOT_TRACK"] = "1"
if "PYTEST_XDIST_WORKER" not in os.environ:
    # In place of the person's own: its server, profile and results stay as they are.
    _prefect_home = tempfile.TemporaryDirectory(
        prefix="trialflow-tests-", ignore_cleanup_errors=True
    )
    os.environ["PREFECT_HOME"] = _prefect_home.name
# A shell starts background jobs with SIGINT ignored, and commands under test would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A loader's worker that is forked from a process which has run a flow would end with exit code 1:
# Prefect's services, whose threads it does not have, are to be ended at its exit.
os.register_at_fork(after_in_child=threading._threading_atexits.clear)  # type: ignore[attr-defined]

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

FLOWS = ("flows", "flow-ends")
"""Groups of tests with a Prefect server; each starts its own. A server that waits takes 3 % of a
processor."""
FLOW_ENDS = ("lifecycle", "retraining", "server")
"""Folders of `flows` that make a group: few of their tests start ranks."""
SCRIPTS = ("trainer", "core_api", "driver")
"""Folders of `trial_core` whose ranks are scripts: they use no warm group."""

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
    "tests.support.node_clusters",
]


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group tests that share servers or warm ranks: one process of xdist runs a group.

    A process that has run a Prefect flow keeps exit hooks of its threads, and the forked workers of
    a data loader fail in them. So in one process flows come last. With several processes the first
    one begins with flows, the second one with loaders, the others with the longest groups.
    """
    here = Path(__file__).parent
    for item in items:
        if group := _group(item, item.path.relative_to(here)):
            item.add_marker(pytest.mark.xdist_group(group))
    others = {*map(_group_of, items)} - {*FLOWS, "loaders", ""}
    order = ["loaders", *sorted(others), "", *FLOWS]
    if "PYTEST_XDIST_WORKER" in os.environ:
        order = [FLOWS[0], "loaders", "ranks", *FLOWS[1:], *sorted(others - {"ranks"}), ""]
    items.sort(key=lambda item: order.index(_group_of(item)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fail if xdist does not see the groups: every process would start every server."""
    gc.freeze()
    gc.enable()
    if getattr(session.config.option, "loadgroup", False):
        for item in session.items:
            if _group_of(item) and "@" not in item.nodeid:
                raise pytest.UsageError(f"xdist does not see the group of {item.nodeid}")


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print each failure when it happens: a run that is ended from outside prints no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(
            f"\n{report.when} of {report.nodeid} failed: {report.longreprtext[-800:]}", flush=True
        )


def _group(item: pytest.Item, path: Path) -> str:
    """The group of a test; empty: none."""
    if item.get_closest_marker("server"):
        is_end = path.parts[0] == "flows" and path.parts[1] in FLOW_ENDS
        return "flow-ends" if is_end else "flows"
    if item.get_closest_marker("gateway"):
        return "gateway"
    if item.get_closest_marker("slots"):
        is_script = path.parts[0] == "trial_core" and path.parts[1] in SCRIPTS
        return "scripts" if is_script else "ranks"
    if item.get_closest_marker("ray"):
        return "ray"
    if path.parts[:2] == ("trial_core", "pytorch"):
        return "loaders"
    return ""


def _group_of(item: pytest.Item) -> str:
    marker = item.get_closest_marker("xdist_group")
    return str(marker.args[0]) if marker else ""
