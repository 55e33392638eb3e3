"""Fixtures that several tests share. Servers and warm ranks start once a session."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before anything imports deepspeed or prefect: tests run on CPU ranks, and speak to nobody.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
os.environ["DO_NOT_TRACK"] = "1"

pytest_plugins = [
    "tests.support.s3",
    "tests.support.slots",
    "tests.support.prefect",
    "tests.support.flow",
    "tests.support.faults.scene",
]


ANYWHERE = ("trial_core/checkpoint", "deployments")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Flows last. Quick tests say first what is broken; and a process that has run a Prefect flow
    keeps exit hooks of its threads, over which a data loader's forked workers stumble.

    `make test` has two processes: one for flows and servers, one for warm ranks, so that neither
    is started twice; what needs none of them goes to whoever is free.
    """
    items.sort(key=lambda item: item.get_closest_marker("server") is not None)
    here = Path(__file__).parent
    for item in items:
        if item.get_closest_marker("server") or item.get_closest_marker("gateway"):
            item.add_marker(pytest.mark.xdist_group("flows"))
        elif not item.path.relative_to(here).as_posix().startswith(ANYWHERE):
            item.add_marker(pytest.mark.xdist_group("ranks"))
