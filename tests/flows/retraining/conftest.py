from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.prefect import PrefectServer
from tests.support.retraining import RetrainHarness


@pytest.fixture
def harness(
    prefect_server: PrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RetrainHarness]:
    """A model without versions."""
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path / "home"))
    harness = RetrainHarness(prefect_server, tmp_path)
    harness.replace_ranks(monkeypatch)
    with prefect_server.configured():
        yield harness
