"""What the flow `train` starts from, without ranks to fetch it."""

from __future__ import annotations

from pathlib import Path

import pytest

import trialflow.flows.train
from tests.support.manifests import new_manifest
from tests.support.slots import toy_config
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.resume_point import ResumePoint
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig
from trial_core.errors import CheckpointDamaged
from trial_core.run.observer import Observer
from trialflow.tasks.run import TrialRun

TRIAL = "toy-0000beef"


@pytest.fixture(autouse=True)
def damaged(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Of which checkpoints it is found, once they are fetched, that they are damaged."""
    uuids: set[str] = set()

    def fetch(run: TrialRun, start: ResumePoint, manifest: Manifest) -> str | None:
        return f"{manifest.uuid} lacks a file" if manifest.uuid in uuids else None

    monkeypatch.setattr(trialflow.flows.train, "fetch", fetch)
    return uuids


def new_run(folder: Path, config: ExperimentConfig | None = None) -> TrialRun:
    store = CheckpointStore(f"file://{folder}/checkpoints")
    return TrialRun(config or toy_config(folder), TRIAL, folder, store, Observer())


def saved(run: TrialRun, batches: int, trial: str = TRIAL) -> Manifest:
    manifest = new_manifest(batches, trial=trial)
    run.store.commit(manifest)
    return manifest


def test_the_newest_undamaged_checkpoint(tmp_path: Path, damaged: set[str]) -> None:
    """The last one saved has a hole: it gives way to the one before it."""
    run = new_run(tmp_path)
    older, newer = saved(run, 4), saved(run, 8)
    damaged.add(newer.uuid)
    assert trialflow.flows.train.fetch_start(run).uuid == older.uuid


def test_where_all_are_damaged_nothing_begins(tmp_path: Path, damaged: set[str]) -> None:
    """A trial that has saved begins anew neither with nothing nor with the source it once had."""
    source = new_manifest(3, trial="other-0000beef")
    searcher = {
        "name": "single", "metric": "loss", "max_length": {"batches": 9},
        "source_checkpoint_uuid": source.uuid,
    }  # fmt: skip
    run = new_run(tmp_path, toy_config(tmp_path, searcher=searcher))
    run.store.commit(source)
    older, newer = saved(run, 4), saved(run, 8)
    damaged |= {older.uuid, newer.uuid}
    with pytest.raises(CheckpointDamaged) as refusal:
        trialflow.flows.train.fetch_start(run)
    assert str(refusal.value).startswith(
        f"none of the 2 checkpoint(s) of trial {TRIAL} is intact; the last one tried: "
        f"{older.uuid} lacks a file. Put back its files, or start a new trial"
    )


def test_a_trial_that_has_saved_nothing_begins(tmp_path: Path) -> None:
    """There is nothing to lose."""
    assert trialflow.flows.train.fetch_start(new_run(tmp_path)) == ResumePoint()
