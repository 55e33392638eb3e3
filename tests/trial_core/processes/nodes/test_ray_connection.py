"""The connection to a Ray cluster, where none is needed."""

from __future__ import annotations

import os

import pytest

from tests.support.processes import descendants, wait_until_gone
from trial_core.processes.nodes import ray_connection


def test_an_interrupted_check_of_the_cluster_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C, while a client of the check still waits for the cluster."""

    def interrupted() -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(ray_connection, "_KNOCK", "import time; time.sleep(60)")
    before = descendants(os.getpid())
    with pytest.raises(KeyboardInterrupt):
        ray_connection.check_admission("127.0.0.1:1", False, 5.0, interrupted)
    left = [pid for pid in descendants(os.getpid()) if pid not in before]
    assert wait_until_gone(left, 5.0) == []
