"""A run and its report in Prefect's UI, in a real browser."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support.browser import Browser, chromium
from tests.support.flow import stages, train
from tests.support.prefect import ROOT, PrefectServer
from tests.support.prefect_worker import Scene
from tests.support.slots import toy_config
from tests.support.waiting import until
from trial_core.config import load_config

pytestmark = [pytest.mark.slots, pytest.mark.server, pytest.mark.browser, pytest.mark.long]

SCREENSHOTS = os.environ.get("TRIALFLOW_SCREENSHOTS")  # a folder to save screenshots in
CURVES = (
    "return [...document.querySelectorAll('svg .line-plot-0 path')].map(p => p.getAttribute('d'))"
)


@dataclass
class Watched:
    """Two runs of a trial, the first of which lost a rank; and a browser."""

    server: PrefectServer
    browser: Browser
    first: Any
    second: Any

    def page(self, result: Any) -> str:
        """The page of a run."""
        return f"{self.server.ui_url}/v2/runs/flow-run/{result.flow_run_id}"

    def open_report(self, result: Any, expecting: str) -> None:
        """Open the run's report, and wait until its curves are drawn."""
        (artifact,) = self.server.query(
            "artifacts/filter",
            {"artifacts": {"flow_run_id": {"any_": [result.flow_run_id]}}},
        )
        assert artifact["key"] == f"trial-{result.trial}"
        self.browser.open(f"{self.server.ui_url}/v2/artifacts/artifact/{artifact['id']}", expecting)
        self.browser.wait_for(lambda: len(self.curves()) >= 3, "curves")

    def curves(self) -> list[str]:
        """The paths of the lines that are drawn."""
        found: list[str] = self.browser._driver.execute_script(CURVES)
        return found


@pytest.fixture(scope="module")
def watched(
    prefect_server: PrefectServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Watched]:
    here = tmp_path_factory.mktemp("ui")

    def config(batches: int) -> Any:
        return toy_config(
            here, batches, name="seen in the UI", scheduling_unit=10, max_restarts=1,
            checkpoint_policy="all", min_validation_period={"batches": 10},
            resources={"slots_per_trial": 1},
            hyperparameters={
                "record": str(here), "ballast_mib": 32,
                "do": "kill", "at_batch": 35, "once": str(here / "once"),
            },
        )  # fmt: skip

    with (
        pytest.MonkeyPatch.context() as patch,
        prefect_server.configured(),
        chromium() as browser,
    ):
        patch.setenv("TRIALFLOW_HOME", str(here / "home"))
        first = train(config(40))
        second = train(config(80), first.trial)
        yield Watched(prefect_server, browser, first, second)


def test_the_timeline(watched: Watched) -> None:
    """Every stage has its name and batches; an upload overlaps the training after it."""
    recorded = stages(watched.server, watched.second.flow_run_id, "checkpoint-upload @80")
    watched.browser.open(watched.page(watched.second), "trained [40→50]")  # a line of its log
    watched.browser.open(f"{watched.page(watched.second)}?tab=TaskRuns", "train-workload [70→80]")
    for stage in ("validate @80", "checkpoint-save @80", "checkpoint-upload @80"):
        assert stage in watched.browser.text
    ran = {stage.name: stage for stage in recorded}
    upload, training = ran["checkpoint-upload @60"], ran["train-workload [60→70]"]
    assert upload.began < training.ended
    assert training.began < upload.ended


def test_the_report_after_a_restart(watched: Watched) -> None:
    """The report shows progress, the restart's cause, and curves as drawn lines."""
    watched.open_report(watched.first, "batch 40 of 40")
    text = watched.browser.text
    assert "100%" in text
    assert "restart 1 of at most 1: rank 0" in text
    assert "SIGKILL" in text
    assert "resumed from the last checkpoint" in text
    assert "loss: training (blue)" in text
    assert "xychart" not in text
    assert [path.count("L") for path in watched.curves()[:1]] == [3]
    keep(watched.browser, "report-restarted.png")


def test_the_report_of_a_resumed_trial(watched: Watched) -> None:
    """The report has the curves and checkpoints of both runs, and marks the best."""
    watched.open_report(watched.second, "batch 80 of 80")
    assert [path.count("L") for path in watched.curves()[:1]] == [7]
    text = watched.browser.text
    assert "resumed from the last checkpoint; previous run: completed" in text
    assert watched.first.checkpoint_uuid in text
    assert watched.second.checkpoint_uuid in text
    assert "(best)" in text
    assert f"{watched.second.checkpoint_url}".rpartition("/")[0] in text


def test_an_example_warns_of_nothing(prefect_server: PrefectServer, here: Path) -> None:
    """Its log and its report, which are the pictures of the site's first page, have no warning."""
    pytest.importorskip("sklearn", reason="this example reads data of scikit-learn")
    changes = (
        "name=digits", f"checkpoint_storage=file://{here}/checkpoints", "scheduling_unit=40",
        "searcher.max_length={batches: 480}", "min_validation_period={batches: 160}",
        "min_checkpoint_period={batches: 160}", "hyperparameters.lr=0.0005",
    )  # fmt: skip
    done = train(load_config(ROOT / "examples" / "digits" / "pytorch.yaml", changes))
    stages(prefect_server, done.flow_run_id, "checkpoint-upload @480")
    warnings = {"flow_run_id": {"any_": [done.flow_run_id]}, "level": {"ge_": 30}}
    assert prefect_server.query("logs/filter", {"logs": warnings}) == []
    with chromium(width=1340, height=1700) as browser:
        seen = Watched(prefect_server, browser, done, done)
        browser.open(seen.page(done), "trained [0→40]")  # a line of its log
        keep(browser, "run.png", box=(256, 0, 1325, 520))
        seen.open_report(done, "batch 480 of 480")
        assert "Events" not in browser.text
        keep(browser, "report.png", box=(256, 178, 918, 1440))
    with chromium(width=900, height=1300) as browser:
        (report,) = (here / "home").rglob("report.html")
        browser.open(report.as_uri(), "batch 480 of 480")
        keep(browser, "report-html.png", box=(0, 0, 885, 850))


def test_a_flow_of_ones_own(
    prefect_server: PrefectServer, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its page shows its trainings, its own task, and what becomes of the better model."""
    example = here / "nightly"
    shutil.copytree(
        ROOT / "examples" / "nightly", example, ignore=shutil.ignore_patterns("data", "models")
    )
    monkeypatch.syspath_prepend(example)
    nightly = importlib.import_module("nightly").nightly
    seen: list[str] = []

    def note(flow: Any, flow_run: Any, state: Any) -> None:
        seen.append(str(flow_run.id))

    nightly.with_options(on_running=[note])("2026-01-31")
    recorded = stages(prefect_server, seen[0], "export → 2026-01-31.safetensors")
    names = [stage.name.partition("-")[0] for stage in recorded]
    assert [name for name in names if name in ("train", "evaluate")] == ["train"] * 2 + ["evaluate"]
    with chromium() as browser:
        page = f"{prefect_server.ui_url}/v2/runs/flow-run/{seen[0]}"
        browser.open(page, "is the champion")  # a line of its log
        keep(browser, "compose.png")
        browser.open(f"{page}?tab=TaskRuns", "promote → demand")
        assert "prepare" in browser.text
        browser.open(f"{page}?tab=SubflowRuns", "demand-evaluation")


def test_the_buttons_that_end_and_continue_a_run(scene: Scene) -> None:
    """Pause, pressed as it is, has no limit: the run saves and ends, and Resume continues it."""
    page = f"{scene.server.ui_url}/v2/runs/flow-run/{scene.run_id}"
    with chromium(height=560) as browser:
        browser.open(page, "Running")
        browser.press("Open menu")
        keep(browser, "run-menu.png", is_changing=True)
        browser.press("Pause")
        browser.wait_for(lambda: "Timeout (seconds)" in browser.text, "the dialog")
        keep(browser, "run-pause.png", is_changing=True)
        browser.press("Pause Flow Run")
        until(lambda: not scene.processes(), "no process", instead=scene.shown)
        assert scene.run()["state"]["state_details"]["pause_timeout"] is None
        saved = scene.saved()
        browser.open(page, "Suspended")
        browser.press("Open menu")
        browser.press("Resume")
        browser.wait_for(lambda: "Resume the paused flow run" in browser.text, "the dialog")
        browser.press("Resume", in_dialog=True)
        scene.until_resumed(saved, saved)


def keep(
    browser: Browser,
    name: str,
    is_changing: bool = False,
    box: tuple[int, int, int, int] | None = None,
) -> None:
    """Save a screenshot if TRIALFLOW_SCREENSHOTS is set. A page of a run in progress changes.

    Args:
        box: the part to save: left, upper, right and lower pixel.
    """
    if SCREENSHOTS:
        path = Path(SCREENSHOTS) / name
        browser.save_png(path, is_changing)
        with Image.open(path) as whole:
            whole.crop(box).quantize(128).save(path, optimize=True)
