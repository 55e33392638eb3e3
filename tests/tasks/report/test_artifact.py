"""The report on a real Prefect server."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from prefect import flow

import trialflow.tasks.report.live_report
from tests.support.prefect import PrefectServer
from tests.support.slots import toy_config
from trial_core.run.observer import Observer
from trialflow.flows.server.embedded import flush
from trialflow.tasks.report import Report
from trialflow.tasks.report.artifact import ReportArtifact

pytestmark = pytest.mark.server

LIMIT_SECONDS = 30.0


def artifacts(server: PrefectServer, key: str) -> list[dict[str, Any]]:
    """Those of that key."""
    found: list[dict[str, Any]] = server.query(
        "artifacts/filter", {"artifacts": {"key": {"any_": [key]}}}
    )
    return found


def test_a_flow_run_that_is_tried_again_has_one_artifact(prefect_server: PrefectServer) -> None:
    """Updated in place, by a retry too; another flow run of the trial has its own, same key."""
    tries = []

    @flow(retries=1)
    def run() -> None:
        tries.append(1)
        artifact = ReportArtifact("Toy.run_0000beef")
        artifact.write(f"first, try {len(tries)}")
        artifact.write(f"second, try {len(tries)}")
        if len(tries) == 1:
            raise RuntimeError("once")

    with prefect_server.configured():
        run()
        flush()
        assert [each["data"] for each in artifacts(prefect_server, "trial-toy-run-0000beef")] == [
            "second, try 2"
        ]
        run()
        flush()
    found = artifacts(prefect_server, "trial-toy-run-0000beef")
    assert sorted(each["data"] for each in found) == ["second, try 2", "second, try 3"]
    assert len({each["flow_run_id"] for each in found}) == 2


def test_the_report_moves_while_a_workload_goes_on(
    prefect_server: PrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has to end a workload of an hour for the bar to move; and updates keep their pace."""
    monkeypatch.setattr(trialflow.tasks.report.live_report, "UPDATE_SECONDS", 0.3)
    written: list[float] = []
    write = ReportArtifact.write

    def noting(self: ReportArtifact, text: str) -> None:
        written.append(time.monotonic())
        write(self, text)

    monkeypatch.setattr(ReportArtifact, "write", noting)

    @flow
    def run() -> str:
        with Report(toy_config(tmp_path), "toy-live", tmp_path, Observer()) as report:
            report.run_started("toy-live", 1000, 0, 16)
            report.stage_started("train-workload", "[0→1000]")
            deadline = time.monotonic() + LIMIT_SECONDS
            batches = 0
            while not any("batch 5" in each["data"] for each in artifacts(prefect_server, key)):
                assert time.monotonic() < deadline, "the artifact does not move"
                report.batches_trained(batches := min(batches + 50, 599))
            report.ended("completed")
        return str(artifacts(prefect_server, key)[0]["data"])

    key = "trial-toy-live"
    with prefect_server.configured():
        text = run()
        flush()
    assert "**completed**" in text
    in_thread = written[:-1]  # the last one is the end's
    assert all(b - a >= 0.3 for a, b in pairwise(in_thread))
