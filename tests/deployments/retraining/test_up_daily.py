"""`trialflow up` with the daily example; a day is a minute here."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deployments.test_up import Up, up
from tests.support.cli import trialflow
from tests.support.prefect import isolated
from tests.support.waiting import until
from trial_core.checkpoint.store import CheckpointStore
from trial_core.models.registry import Registry

pytestmark = [pytest.mark.long, pytest.mark.server, pytest.mark.slots]

EXAMPLE = Path(__file__).parents[3] / "examples" / "gpt_stdlib"
MODEL = "gpt-daily"
A_DAY_A_MINUTE = (
    "{% set t = scheduled_time %}{{ (t + timedelta(days=60 * t.hour + t.minute)).date() }}"
)
# A run takes half a minute on an idle machine.
EVERY_SECONDS = 75


class Days:
    """The daily example under `trialflow up`: tiny, on one rank, every 75 s.

    Attributes:
        running: the `trialflow up`.
        registry: its models.
    """

    def __init__(self, folder: Path, running: Up) -> None:
        self.running = running
        self.registry = Registry(CheckpointStore(f"file://{folder}/checkpoints"))
        self._path = f"deployments/name/retrain/{MODEL}"

    def runs(self) -> list[dict[str, Any]]:
        """Its runs that are due, in order."""
        body = {"sort": "EXPECTED_START_TIME_ASC"}
        found: list[dict[str, Any]] = self.running.query("flow_runs/filter", body)
        now = datetime.now(timezone.utc)
        return [
            run
            for run in found
            if run["state_type"] != "SCHEDULED"
            or datetime.fromisoformat(run["expected_start_time"]) <= now
        ]

    def failed(self) -> list[str]:
        """The states of runs that failed or were restarted."""
        expected = ("Completed", "Skipped")
        return [
            f"{run['state']['name']}: {run['state']['message']}"
            for run in self.runs()
            if (run["end_time"] and run["state_name"] not in expected) or run["run_count"] > 1
        ]

    def completed(self) -> list[dict[str, Any]]:
        """The runs that decided."""
        return [run for run in self.runs() if run["state_name"] == "Completed"]

    def end(self) -> None:
        """Pause the deployment and wait for its runs."""
        deployment = self.running.get(self._path)
        with self.running.client() as client:
            client.post(f"deployments/{deployment['id']}/pause_deployment").raise_for_status()
        until(lambda: all(run["end_time"] for run in self.runs()), "the end of all runs", 240)
        assert self.failed() == []

    def check(self) -> None:
        """Each run had the data of its time; the champion is intact; the moves have no gaps and are
        those that the runs recorded."""
        plans = {run["id"]: self._record(run["id"], "plan") for run in self.completed()}
        for run in self.completed():
            at = datetime.fromisoformat(run["expected_start_time"]).astimezone(timezone.utc)
            day = (at + timedelta(days=60 * at.hour + at.minute)).date()
            assert plans[run["id"]]["data"]["window_end"] == day.isoformat()
        assert len({plan["data"]["window_end"] for plan in plans.values()}) == len(plans)

        versions, moves = self.registry.versions(MODEL), self.registry.moves(MODEL)
        assert [each.number for each in versions] == list(range(1, len(plans) + 1))
        assert {each.run for each in versions} == set(plans)
        assert [each.number for each in moves] == list(range(1, len(moves) + 1))
        for before, after in pairwise(moves):
            assert after.previous == before.champion != after.champion
        promoted = [run for run in plans if self._record(run, "outcome")["promoted"]]
        assert [each.run for each in moves] == promoted
        champion = self.registry.champion(MODEL)
        assert champion is not None
        self.registry.store.verify(champion.checkpoint)

    def _record(self, run: str, name: str) -> dict[str, Any]:
        key = f"models/{MODEL}/retrainings/{run}/{name}.json"
        record: dict[str, Any] = json.loads(self.registry.store.storage.read(key) or b"{}")
        return record


@contextmanager
def days(folder: Path) -> Iterator[Days]:
    """The example under `trialflow up daily.yaml`, until the end of the block."""
    daily = yaml.safe_load((EXAMPLE / "daily.yaml").read_text())
    daily["code"] = str(EXAMPLE)
    daily["checkpoint_storage"] = {
        "url": f"file://{folder}/checkpoints", "save_trial_best": 1, "save_trial_latest": 0
    }  # fmt: skip
    daily["resources"] = {"slots_per_trial": 1}
    daily["data"]["window_end"] = A_DAY_A_MINUTE
    tiny = {"layers": 1, "heads": 2, "width": 32, "window": 32, "validation_windows": 64}
    daily["hyperparameters"].update(tiny)
    daily["searcher"]["max_length"] = {"batches": 40}
    daily["min_validation_period"] = daily["min_checkpoint_period"] = {"batches": 20}
    daily["retraining"].update(
        schedule={"interval_seconds": EVERY_SECONDS}, max_lateness_seconds=EVERY_SECONDS
    )
    (folder / "daily.yaml").write_text(yaml.safe_dump(daily))
    with up(folder, 0, "daily.yaml") as running:
        yield Days(folder, running)
        running.stop(signal.SIGINT)


def test_a_few_days(tmp_path: Path) -> None:
    """Two scheduled runs, and one with data that arrived."""
    with days(tmp_path) as daily:
        until(lambda: len(daily.completed()) >= 2 or daily.failed(), "two runs", 400, daily.failed)
        daily.end()
        assert len(daily.completed()) >= 2
        daily.check()
        api = {**isolated(tmp_path / "prefect"), "PREFECT_API_URL": f"{daily.running.url}/api"}
        done = trialflow(
            tmp_path, "data-arrived", MODEL, "--data", "window_end=2026-01-31", variables=api
        )
        assert done.returncode == 0, done.stderr
        arrived = {"window_end": "2026-01-31"}
        until(lambda: daily.runs()[-1]["parameters"].get("data") == arrived, "a run with the data")
        until(lambda: daily.runs()[-1]["end_time"], "its end", 200)
        assert daily.failed() == []
        assert daily.runs()[-1]["state_name"] == "Completed"
