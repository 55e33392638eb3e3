"""`trialflow runs show` on a local storage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.manifests import new_manifest
from tests.trial_core.ledger.test_time_ledger import run_time
from trial_core.checkpoint import layout
from trial_core.checkpoint.json_objects import encode_json
from trial_core.checkpoint.store import CheckpointStore
from trialflow.deployments.cli.json_result import JsonResult
from trialflow.deployments.cli.main import main


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """A storage with a killed run of gpt-7, one that has ended, and a checkpoint of gpt-11."""
    store = CheckpointStore(f"file://{tmp_path}/storage")
    killed = run_time(1, is_over=False, slot_milliseconds={"train": 3_000_000, "launch": 600_000})
    for record in (killed, run_time(3, per_slot_hour=4.0)):
        store.storage.write(layout.ledger_key("gpt-7", record.number), encode_json(record))
    store.commit(new_manifest(11, trial="gpt-11"))
    return store


def show(store: CheckpointStore, *arguments: str) -> int:
    return main(["runs", "show", *arguments, "--storage", store.url])


def test_the_time_of_all_runs(store: CheckpointStore, capsys: pytest.CaptureFixture[str]) -> None:
    """The sum by bucket with shares, a row for each run, and up to when a killed one counts."""
    assert show(store, "gpt-7") == 0
    text = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "gpt-7: goodput 86.1 % of 3 h 00 min slot time in 2 runs, cost 7.00"
    assert {"queue 15 min 00 s 8.3 %", "launch 10 min 00 s 5.6 %", "train 2 h 35 min 86.1 %"} <= (
        set(lines)
    )
    first, second = [line for line in lines if "ann@node-1" in line]
    assert first.startswith("1 ann@node-1")
    assert first.endswith("2 1 h 00 min 83.3 %")
    assert second.endswith("2 2 h 00 min 87.5 % 7.00")
    assert "run 1 has no recorded end" in text
    assert "counts until 2031-05-09 18:00:00 UTC" in text
    assert "the cost leaves out 1 run without a price" in text


def test_as_json(store: CheckpointStore, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole ledger; `train --json` prints the same of a run that has failed."""
    assert show(store, "gpt-7", "--json") == 0
    shown: Any = json.loads(capsys.readouterr().out)
    assert [run["number"] for run in shown["runs"]] == [1, 3]
    assert sum(shown["slot_seconds"].values()) == shown["total_slot_seconds"] == 10800
    outcome = JsonResult(is_printed=False)
    outcome.store, outcome.trial = store, "gpt-7"
    assert json.loads(outcome.line())["ledger"] == shown


def test_a_trial_without_a_ledger(
    store: CheckpointStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is refused with the trials that there are; so is an id that no trial can have."""
    assert show(store, "gpt-9") == 2
    assert f"no run of trial gpt-9 has a ledger of time in {store.url}" in (
        error := capsys.readouterr().err
    )
    assert "trials with checkpoints there: gpt-11" in error
    assert show(store, "../x") != 0
    assert "'../x' cannot be a trial's id" in capsys.readouterr().err
