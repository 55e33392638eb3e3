"""Fixtures that several tests share. Servers and warm ranks start once a session."""

from __future__ import annotations

import os

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Flows last. Quick tests say first what is broken; and a process that has run a Prefect flow
    keeps exit hooks of its threads, over which a data loader's forked workers stumble."""
    items.sort(key=lambda item: item.get_closest_marker("server") is not None)
