"""What nodes must see before they start a run's ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.slots import toy_config
from trial_core.checkpoint.retention.claims import RunClaim
from trial_core.checkpoint.retention.trial_owner import own_trial
from trial_core.checkpoint.store import CheckpointStore
from trial_core.driver.placement import OnNodes
from trial_core.driver.run import Launch, Run
from trial_core.errors import LaunchError, StorageError
from trial_core.processes.nodes.examination import check_storage

TRIAL = "toy-0a"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointStore:
    """A storage that fails while a claim is written."""
    store = CheckpointStore(f"file://{tmp_path}/store")

    def write(key: str, data: bytes) -> None:
        raise StorageError(f"the storage broke down while {key} was written")

    monkeypatch.setattr(store.storage, "write", write)
    return store


def key_for_nodes(run: Run) -> str | None:
    """The object that the nodes of a run must see in its storage."""
    pool: Any = SimpleNamespace(slots_left=0, slots_of=lambda agents: 4, gather=lambda *_, **__: [])
    _, launcher = OnNodes(pool, "4 slots", sends_code=False).prepare(Launch(run))
    assert isinstance(launcher, partial)
    key: str | None = launcher.args[-1]
    return key


def test_a_node_sees_the_storage_of_a_run_whose_claim_was_not_written(
    tmp_path: Path, store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Training continues without a claim, on nodes as well. Another storage is refused."""
    with own_trial(store, TRIAL, "an attempt") as (claim, fence):
        assert f"trial {TRIAL} may have no claim" in caplog.text
        run = Run(toy_config(tmp_path), TRIAL, tmp_path, store, claim=claim, fence=fence)
        key = key_for_nodes(run)
        assert key is not None
        check_storage(store.spec, key)
        elsewhere = CheckpointStore(f"file://{tmp_path}/elsewhere")
        with pytest.raises(LaunchError, match="this node sees another storage than the driver"):
            check_storage(elsewhere.spec, key)


def test_an_evaluation_whose_claim_was_not_written_asks_nodes_for_no_object(
    tmp_path: Path, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stores nothing else."""
    with RunClaim(store, TRIAL) as claim:
        run = Run(toy_config(tmp_path), TRIAL, tmp_path, store, claim=claim)
        assert key_for_nodes(run) is None
    monkeypatch.undo()
    with RunClaim(store, TRIAL) as run.claim:
        check_storage(store.spec, str(key_for_nodes(run)))
