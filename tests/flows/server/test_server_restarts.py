"""Starting a server again, on a stand-in for the server."""

from __future__ import annotations

import threading
from typing import cast

import pytest

from trialflow.flows.server import server_restarts
from trialflow.flows.server.prefect_server import PrefectServerProcess
from trialflow.flows.server.server_restarts import restarting

TIMEOUT_SECONDS = 30.0


class EndedServer:
    """A server that has ended, and that the machine has no memory for at first."""

    def __init__(self) -> None:
        self.restarts = 0
        self.has_ended = True
        self.is_back = threading.Event()
        self.refused_after: set[int] = set()

    def restart(self) -> None:
        self.restarts += 1
        if self.restarts < 3:
            raise OSError("cannot allocate memory")
        self.has_ended = False
        self.is_back.set()

    def refuse_connections(self) -> None:
        self.refused_after.add(self.restarts)


def test_a_restart_is_repeated_until_it_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no more often. Connections wait for the first restart; while they are repeated, they are
    refused. The thread ends with the block."""
    monkeypatch.setattr(server_restarts, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(server_restarts, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(server_restarts, "MAX_PAUSE_SECONDS", 0.002)
    server = EndedServer()
    with restarting(cast(PrefectServerProcess, server)):
        assert server.is_back.wait(TIMEOUT_SECONDS)
    assert server.restarts == 3
    assert server.refused_after == {1, 2}
    assert "server-restarts" not in {thread.name for thread in threading.enumerate()}
