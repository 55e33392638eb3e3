"""A retraining that is killed at the boundaries of its stages, and run again as the same flow run.

The kill is an exception that nothing catches; ranks are stood in for. `test_retrain_ranks` has a
real SIGKILL.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.prefect import PrefectServer
from tests.support.retraining import Bench, Killed
from trial_core.errors import PromotionConflict
from trial_core.models.journal import Journal
from trial_core.models.registry import Registry
from trial_core.run.run_dirs import trial_id

pytestmark = pytest.mark.server

NOTES = ("plan", "champion", "challenger", "verdict", "outcome", "told", "callback-00")
# What a kill is most likely to spoil: something outside was done, and not noted.
BY_DEFAULT = [("challenger", "before"), ("outcome", "before"), ("callback-00", "before")]


@pytest.fixture
def bench(
    prefect_server: PrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bench]:
    """A model with a champion, and a callback that counts how often it is called."""
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path / "home"))
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "hooks.py").write_text(
        "def tell(outcome):\n    open('calls', 'a').write('called\\n')\n"
    )
    bench = Bench(prefect_server, tmp_path, code=str(tmp_path / "code"))
    bench.stand_in(monkeypatch)
    with prefect_server.configured():
        bench.promote()
        yield bench


def kill_once(monkeypatch: pytest.MonkeyPatch, note: str, when: str) -> None:
    """Kill the run when it is about to write a note of its own, or just has."""
    original, killed = Journal.note, []

    def dying(self: Journal, name: str, value: Any) -> Any:
        is_it = name == note and not killed
        if is_it and when == "before":
            killed.append(name)
            raise Killed(name)
        noted = original(self, name, value)
        if is_it:
            killed.append(name)
            raise Killed(name)
        return noted

    monkeypatch.setattr(Journal, "note", dying)


@pytest.mark.parametrize(
    ("note", "when"),
    [
        pytest.param(note, when, marks=[] if (note, when) in BY_DEFAULT else pytest.mark.long)
        for note in NOTES
        for when in ("before", "after")
    ],
)
def test_a_run_that_was_killed_comes_to_the_same(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, note: str, when: str
) -> None:
    """Whatever stage it was killed in, done and not yet noted or just noted: one version, one move,
    the same report; the model has the old champion or the new one at any time."""
    run = bench.create(callbacks=["hooks:tell"], data={"day": 1})
    kill_once(monkeypatch, note, when)
    with pytest.raises(Killed, match=note):
        bench.execute(run)
    is_moved = len(bench.moves()) == 2
    assert bench.champion() == (2 if is_moved else 1)
    assert is_moved == (note in NOTES[4:])
    bench.store.verify(bench.registry.version(bench.model, bench.champion() or 0).checkpoint)

    result = bench.execute(run)
    assert (result.promoted, result.champion, result.challenger) == (True, 1, 2)
    assert result.why == "better by 0.2: loss 0.5 against the champion's 0.7"
    assert [(move.champion, move.previous) for move in bench.moves()] == [(1, None), (2, 1)]
    assert len(bench.registry.versions(bench.model)) == 2
    assert [manifest.trial for manifest in bench.store.list()][1:] == [
        trial_id(bench.model, str(run))
    ]
    assert "**version 2 promoted**" in bench.report(run)
    assert len(bench.validated) == (2 if (note, when) == ("champion", "before") else 1)
    assert len(bench.trained) == (2 if (note, when) == ("challenger", "before") else 1)
    calls = (bench.folder / "code" / "calls").read_text().split()
    assert len(calls) == (2 if (note, when) == ("callback-00", "before") else 1)


@pytest.mark.long
def test_an_event_that_was_sent_is_not_sent_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a run that was killed before it could note that; Prefect knows it by its id."""
    run = bench.create()
    kill_once(monkeypatch, "told", "before")
    with pytest.raises(Killed):
        bench.execute(run)
    bench.execute(run)
    bench.loss = 0.4
    bench.run()  # once its event is there, so are all before it
    assert len(bench.events(at_least=2)) == 2


def test_what_others_do_meanwhile_changes_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was killed once it had moved the alias does not take back what a person has done
    since."""
    run = bench.create()
    kill_once(monkeypatch, "outcome", "before")
    with pytest.raises(Killed):
        bench.execute(run)
    bench.registry.rollback(bench.model)
    assert bench.execute(run).promoted
    assert (bench.champion(), len(bench.moves())) == (1, 3)


def test_an_attempt_that_was_taken_for_dead(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It moves the alias just before its successor can: their run has promoted, and says so."""
    promote = Registry.promote

    def too_late(self: Registry, *arguments: Any, **more: Any) -> Any:
        promote(self, *arguments, **more)
        raise PromotionConflict("somebody else was quicker")

    monkeypatch.setattr(Registry, "promote", too_late)
    result = bench.run()
    assert (result.promoted, bench.champion(), len(bench.moves())) == (True, 2, 2)
