"""What a person sees of a run in Prefect's UI, in a real browser."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.browser import chromium
from tests.support.prefect import PrefectServer
from tests.support.slots import toy_config

pytestmark = [pytest.mark.slots, pytest.mark.server, pytest.mark.browser]

SCREENSHOTS = os.environ.get("TRIALFLOW_SCREENSHOTS")  # a folder: keep pictures there


def test_the_page_of_a_run(
    prefect_server: PrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timeline names every stage with its batches; the report shows metrics and curves."""
    from flows.embedded import flush
    from flows.train import train

    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path / "home"))
    config = toy_config(
        tmp_path, 40, name="what a person sees", scheduling_unit=10, checkpoint_policy="all",
        min_validation_period={"batches": 20},
    )  # fmt: skip
    with prefect_server.configured():
        result = train(config)
        flush()
    (artifact,) = prefect_server.query(
        "artifacts/filter", {"artifacts": {"key": {"any_": [f"trial-{result.trial}"]}}}
    )
    with chromium() as browser:
        page = f"{prefect_server.ui_url}/v2/runs/flow-run/{result.flow_run_id}"
        browser.open(page, "trained [0→10]")  # a line of its log
        keep(browser, "run.png")
        browser.open(f"{page}?tab=TaskRuns", "train-workload [30→40]")
        for stage in ("validate @40", "checkpoint-save @40", "checkpoint-upload @40"):
            assert stage in browser.text
        browser.open(
            f"{prefect_server.ui_url}/v2/artifacts/artifact/{artifact['id']}", "batch 40 of 40"
        )
        browser.wait_for(lambda: "validation: loss" in browser.text, "validation curve")
        keep(browser, "report.png")


def keep(browser: object, name: str) -> None:
    """Save a picture of the page, if somebody wants it."""
    if SCREENSHOTS:
        browser.save_png(Path(SCREENSHOTS) / name)  # type: ignore[attr-defined]
