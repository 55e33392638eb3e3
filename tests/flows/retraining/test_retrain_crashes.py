"""A retraining that is killed at a stage boundary, and run again as the same flow run.

The kill is an exception that nothing catches; `test_retrain_ranks` has a real SIGKILL.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.retraining import Killed, RetrainHarness
from tests.support.stores import mount, unmount
from trial_core.checkpoint.layout import MARK
from trial_core.checkpoint.storage_mark import read_mark
from trial_core.errors import PromotionConflict, StorageError
from trial_core.models.journal import Journal
from trial_core.models.registry import Registry
from trial_core.processes.machine.run_dirs import trial_id

pytestmark = pytest.mark.server

RECORDS = ("plan", "champion", "challenger", "verdict", "outcome", "told", "callback-00")
# A harmful kill: something outside was changed, and not recorded.
BY_DEFAULT = ("challenger", "before")


@pytest.fixture
def code(harness: RetrainHarness) -> Path:
    """Gives the model a champion, and the experiment a callback that counts its calls."""
    harness.promote_by_hand()
    return harness.write_callbacks(
        "def tell(outcome):\n    open('calls', 'a').write('called\\n')\n"
    )


def kill_once(monkeypatch: pytest.MonkeyPatch, record: str, when: str) -> None:
    """Kill the run before or after it writes a record."""
    original, killed = Journal.write, []

    def write(self: Journal, name: str, value: Any) -> Any:
        is_due = name == record and not killed
        if is_due and when == "before":
            killed.append(name)
            raise Killed(name)
        written = original(self, name, value)
        if is_due:
            killed.append(name)
            raise Killed(name)
        return written

    monkeypatch.setattr(Journal, "write", write)


@pytest.mark.parametrize(
    ("record", "when"),
    [
        pytest.param(record, when, marks=[] if (record, when) == BY_DEFAULT else pytest.mark.long)
        for record in RECORDS
        for when in ("before", "after")
    ],
)
def test_a_killed_run_continues(
    harness: RetrainHarness,
    code: Path,
    monkeypatch: pytest.MonkeyPatch,
    record: str,
    when: str,
) -> None:
    """Wherever it was killed: one version, one move, the same report, no stage twice except the
    interrupted one; the model always has a champion."""
    run = harness.create_run(callbacks=["hooks:tell"], data={"day": 1})
    kill_once(monkeypatch, record, when)
    with pytest.raises(Killed, match=record):
        harness.execute(run)
    is_promoted = len(harness.moves()) == 2
    assert harness.champion() == (2 if is_promoted else 1)
    assert is_promoted == (record in RECORDS[4:])
    champion = harness.registry.version(harness.model, harness.champion() or 0)
    harness.store.verify(champion.checkpoint)

    result = harness.execute(run)
    assert (result.promoted, result.champion, result.challenger) == (True, 1, 2)
    assert result.why == "better by 0.2: the challenger's loss 0.5 against the champion's 0.7"
    assert [(move.champion, move.previous) for move in harness.moves()] == [(1, None), (2, 1)]
    assert len(harness.registry.versions(harness.model)) == 2
    trials = [manifest.trial for manifest in harness.store.list()]
    assert trials[1:] == [trial_id(harness.model, str(run))]
    assert "**version 2 promoted**" in harness.report(run)
    killed_at = (record, when)
    assert len(harness.validated) == (2 if killed_at == ("champion", "before") else 1)
    assert len(harness.trained) == (2 if killed_at == ("challenger", "before") else 1)
    calls = (code / "calls").read_text().split()
    assert len(calls) == (2 if killed_at == ("callback-00", "before") else 1)


@pytest.mark.long
def test_a_killed_run_does_not_begin_again_in_an_empty_folder(
    harness: RetrainHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A storage that is not mounted has no journal and no champion: every challenger would win."""
    harness.promote_by_hand()
    run = harness.create_run()
    kill_once(monkeypatch, "plan", "after")
    with pytest.raises(Killed, match="plan"):
        harness.execute(run)
    root = Path(harness.store.url.removeprefix("file://"))
    unmount(root)
    with pytest.raises(StorageError, match="not the storage with which the run began"):
        harness.execute(run)
    assert harness.moves() == []
    mount(root)
    mark = read_mark(harness.store.storage)
    harness.store.storage.delete(MARK)  # the plan is there
    assert harness.execute(run).promoted
    assert read_mark(harness.store.storage) == mark


@pytest.mark.long
def test_an_event_is_not_sent_twice(
    harness: RetrainHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run killed after sending sends it again with the same id, and Prefect drops it."""
    harness.promote_by_hand()
    run = harness.create_run()
    kill_once(monkeypatch, "told", "before")
    with pytest.raises(Killed):
        harness.execute(run)
    harness.execute(run)
    harness.challenger_loss = 0.4
    harness.run()  # events are recorded in order: once this run's is there, all are
    assert len(harness.events(at_least=2)) == 2


@pytest.mark.long
def test_a_rollback_between_attempts_stands(
    harness: RetrainHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run killed after its promotion does not promote again what a person has rolled back."""
    harness.promote_by_hand()
    run = harness.create_run()
    kill_once(monkeypatch, "outcome", "before")
    with pytest.raises(Killed):
        harness.execute(run)
    harness.registry.rollback(harness.model)
    assert harness.execute(run).promoted
    assert (harness.champion(), len(harness.moves())) == (1, 3)


@pytest.mark.long
def test_a_presumed_dead_attempt_promotes_first(
    harness: RetrainHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer attempt finds the move of its own run and reports a promotion."""
    harness.promote_by_hand()
    promote = Registry.promote

    def promote_too_late(self: Registry, *arguments: Any, **more: Any) -> Any:
        promote(self, *arguments, **more)
        raise PromotionConflict("another attempt was faster")

    monkeypatch.setattr(Registry, "promote", promote_too_late)
    result = harness.run()
    assert (result.promoted, harness.champion(), len(harness.moves())) == (True, 2, 2)
