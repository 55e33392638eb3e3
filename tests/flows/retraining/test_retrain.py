"""The flow `retrain` on a real server and a real registry; ranks are stood in for."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

import trialflow.flows.evaluate
import trialflow.flows.retrain
from tests.support.prefect import PrefectServer
from tests.support.retraining import Bench, Killed
from trial_core.errors import CheckpointDamaged, ConfigError, RankFailed
from trial_core.run.run_dirs import locked_run_dir, trial_id
from trial_core.run.stop_request import StopHandler
from trialflow.tasks.retrain import CallbackFailed

pytestmark = pytest.mark.server

WAIT_SECONDS = 60.0


@pytest.fixture
def bench(
    prefect_server: PrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bench]:
    """A model without versions."""
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path / "home"))
    bench = Bench(prefect_server, tmp_path)
    bench.stand_in(monkeypatch)
    with prefect_server.configured():
        yield bench


def test_the_first_challenger_is_promoted(bench: Bench) -> None:
    """Where there is no champion a finite metric wins; the report is an artifact and a file."""
    result = bench.run()
    assert (result.promoted, result.champion, result.challenger) == (True, None, 1)
    assert (bench.champion(), bench.validated) == (1, [])
    report = bench.report(result.flow_run_id)
    assert "**version 1 promoted**" in report
    assert "loss 0.5, and there was no champion" in report
    assert Path(result.report_path).read_text() == report
    (artifact,) = bench.server.query(
        "artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [result.flow_run_id]}}}
    )
    assert (artifact["key"], artifact["data"]) == (f"retraining-{bench.model}", report)


def test_a_better_challenger_takes_the_champions_place(bench: Bench) -> None:
    """The champion is validated on the same data, and stays as the previous one."""
    old = bench.promote(loss=0.1)  # on the data of its own time
    run = bench.create(margin=0.1, data={"day": "2026-03-01"})
    result = bench.execute(run)
    assert result.promoted
    assert (result.champion_value, result.challenger_value) == (0.7, 0.5)
    assert bench.validated == [bench.registry.version(bench.model, old).checkpoint]
    move = bench.moves()[-1]
    assert (move.champion, move.previous, move.run) == (2, old, str(run))
    report = bench.report(run)
    assert "| loss (decides) | 0.7 | 0.5 | -0.2 |" in report
    assert "| mean_index | 1.5 |  |  |" in report
    assert '"day": "2026-03-01"' in report


def damaged(bench: Bench) -> None:
    bench.loss = 0.1

    def damage(stopping: StopHandler) -> None:
        bench.damage(bench.store.list()[-1].uuid)

    bench.act = damage


def worse(bench: Bench) -> None:
    bench.loss = 0.75


def no_number(bench: Bench) -> None:
    bench.loss = float("nan")


@pytest.mark.parametrize(
    ("challenger", "why"),
    [
        (worse, "worse by 0.05: loss 0.75 against the champion's 0.7"),
        (no_number, "the challenger's loss is nan, not a number"),
        (damaged, "the challenger's checkpoint cannot be used: "),
    ],
)
def test_the_champion_stays(bench: Bench, challenger: Any, why: str) -> None:
    """The report and the result say why."""
    bench.promote()
    challenger(bench)
    result = bench.run()
    assert not result.promoted
    assert result.why.startswith(why)
    assert (bench.champion(), len(bench.moves())) == (1, 1)
    assert "**version 1 kept, " in bench.report(result.flow_run_id)
    assert why in bench.report(result.flow_run_id)


def test_events(bench: Bench) -> None:
    """One a run: that its challenger was promoted, or was not, with all that a machine wants to
    know of it."""
    first = bench.run(data={"day": 1})
    bench.loss = 0.8
    bench.run()
    told = {event["event"]: event["payload"] for event in bench.events(at_least=2)}
    assert set(told) == {"trialflow.model.promoted", "trialflow.model.kept"}
    payload = told["trialflow.model.promoted"]
    assert payload["promoted"]
    assert (payload["champion"], payload["challenger"]) == (None, 1)
    assert (payload["data"], payload["checkpoint_uuid"]) == ({"day": 1}, first.checkpoint_uuid)
    why = "worse by 0.1: loss 0.8 against the champion's 0.7"
    assert told["trialflow.model.kept"]["why"] == why


def test_a_champion_that_is_damaged(bench: Bench) -> None:
    """Nothing is trained nor promoted; the error names the file and the way back."""
    bench.promote()
    path = bench.damage(bench.store.list()[0].uuid)
    run = bench.create()
    expected = f"version 1 .*{re.escape(path)}.*`trialflow models rollback"
    with pytest.raises(CheckpointDamaged, match=expected):
        bench.execute(run)
    assert (bench.trained, bench.champion()) == ([], 1)
    assert "**failed: the champion, version 1" in bench.report(run)


def failed(**how: Any) -> RankFailed:
    return RankFailed(rank=0, host="here", during="validation", **how)


def test_ranks_that_die_while_the_champion_is_validated(bench: Bench) -> None:
    """Are started again, as often as those of a training; one that raises is not."""
    bench.promote()
    bench.changes["max_restarts"] = 2
    bench.failures = [failed(signal_name="SIGKILL"), failed(exit_code=7)]
    assert bench.run().promoted
    assert len(bench.validated) == 3
    bench.failures = [failed(error_type="ValueError", error_message="no such column")]
    with pytest.raises(RankFailed, match="no such column"):
        bench.run()
    assert (len(bench.validated), len(bench.trained)) == (4, 1)


def test_two_runs_race_for_the_alias(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the guard against overlapping: one wins, the other's report says that it came too late,
    and to whom."""
    monkeypatch.setattr(
        trialflow.flows.retrain, "alone", lambda model, waits: contextlib.nullcontext()
    )
    bench.promote()
    both_have_trained = threading.Barrier(2)
    bench.act = lambda stopping: both_have_trained.wait(WAIT_SECONDS)
    runs = [bench.create(), bench.create()]
    ended = [bench.beside(run) for run in runs]
    results = [future.result(WAIT_SECONDS) for future in ended]
    (winner,) = (result for result in results if result.promoted)
    (loser,) = (result for result in results if not result.promoted)
    assert (bench.champion(), len(bench.moves())) == (winner.challenger, 2)
    assert "the champion was moved meanwhile" in bench.report(loser.flow_run_id)
    assert f"version {winner.challenger} " in loser.why


def test_a_champion_that_moved_while_the_run_was_away(bench: Bench) -> None:
    """A later attempt trains nothing, and says who has moved it; the run is done with that."""
    bench.promote()
    run = bench.create()

    def die(stopping: StopHandler) -> None:
        raise Killed

    bench.act = die
    with pytest.raises(Killed):
        bench.execute(run)
    assert (len(bench.validated), len(bench.trained)) == (1, 1)
    other = bench.promote(loss=0.1)
    result = bench.execute(run)
    assert (result.promoted, result.challenger, len(bench.trained)) == (False, None, 1)
    assert result.why.startswith("the champion was moved meanwhile: ")
    assert f"promoted version {other} instead of version 1 at " in result.why
    assert "so nothing was trained" in bench.report(run)
    assert bench.champion() == other
    assert [event["event"] for event in bench.events()] == ["trialflow.model.kept"]


def test_the_champion_is_validated_once_its_dead_attempt_is_gone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt that was taken for dead has the validation's folder for as long as it takes to
    notice: a run of a deployment waits for it, as training does."""

    class Begun(Exception):
        pass

    def begin(run: Any) -> None:
        raise Begun

    monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__ID", "by-a-worker")
    monkeypatch.setattr(trialflow.flows.evaluate, "launch_slots", begin)
    monkeypatch.setattr(trialflow.flows.evaluate, "get_run_logger", lambda: None)
    config, checkpoint = bench.config(), bench.save("trial", 0.5).uuid
    folder = locked_run_dir(trial_id(f"{config.name} evaluation", "unique"))
    folder.__enter__()
    end = threading.Timer(0.5, folder.__exit__, (None, None, None))
    end.start()
    with pytest.raises(Begun), StopHandler(1.0) as stopping:
        trialflow.flows.evaluate.evaluate_checkpoint(config, checkpoint, "unique", stopping, {})
    end.join()


def test_an_overlapping_run_is_skipped(bench: Bench) -> None:
    """It ends Completed, under a name that says so, and leaves nothing."""
    second = bench.create()

    def overlap(stopping: StopHandler) -> None:
        bench.act = lambda stopping: None
        bench.beside(second).result(WAIT_SECONDS)

    bench.act = overlap
    first = bench.run()
    assert first.promoted
    assert len(bench.trained) == 1
    name, message = bench.state(second)
    assert name == "Skipped"
    assert f"model {bench.model} is being retrained by retrain {bench.model}" in message
    assert bench.store.storage.sizes(f"models/{bench.model}/retrainings/{second}") == {}


def test_a_late_run_is_skipped(bench: Bench) -> None:
    """It says how late, before anything is planned; one that is late by less is not."""
    an_hour_ago = datetime.now(timezone.utc) - timedelta(hours=1)
    late = bench.create(scheduled_time=an_hour_ago, max_lateness_seconds=60)
    bench.execute(late)
    name, message = bench.state(late)
    assert name == "Skipped"
    assert "1 h 00 min ago, and retraining.max_lateness_seconds is 60" in message
    assert bench.trained == []
    assert bench.execute(bench.create(scheduled_time=an_hour_ago, max_lateness_seconds=7200))
    assert len(bench.trained) == 1


def test_data_of_the_scheduled_time(bench: Bench) -> None:
    """Templates are rendered for it; what the run is given goes over them, as it is."""
    bench.changes["data"] = {
        "end": "{{ scheduled_time.date() }}",
        "window": {"days": 7, "begin": "{{ (scheduled_time - timedelta(days=7)).date() }}"},
    }
    at = datetime(2026, 3, 1, 3, tzinfo=timezone.utc)
    result = bench.execute(bench.create({"window": {"days": 8}, "new": "{{ x }}"}, at))
    expected = {
        "end": "2026-03-01", "window": {"days": 8, "begin": "2026-02-22"}, "new": "{{ x }}"
    }  # fmt: skip
    assert result.data == expected
    assert bench.trained[0].data == expected


def test_a_template_that_cannot_be_rendered(bench: Bench) -> None:
    """Refused before anything is validated or trained, with its key and what is wrong."""
    bench.promote()
    bench.changes["data"] = {"files": [{"end": "{{ scheduled_tim.date() }}"}]}
    with pytest.raises(ConfigError, match=r"data\.files\[0\]\.end: .*'scheduled_tim' is undefined"):
        bench.run()
    assert (bench.validated, bench.trained) == ([], [])


def test_a_callback_that_is_not_there(bench: Bench) -> None:
    """Refused before anything is trained."""
    said = r"retraining\.callbacks\[0\]: no absent:tell to call: ModuleNotFoundError"
    with pytest.raises(ConfigError, match=said):
        bench.run(callbacks=["absent:tell"])
    assert bench.trained == []


def test_callbacks(bench: Bench) -> None:
    """Each is called with the outcome; one that fails fails the run, which is promoted all the
    same, and is the only one that a retry calls again."""
    code = bench.folder / "code"
    code.mkdir()
    (code / "hooks.py").write_text(
        "import json, pathlib\n"
        "def broken(outcome):\n"
        "    pathlib.Path('calls').open('a').write('broken\\n')\n"
        "    raise ValueError('no such channel')\n"
        "def tell(outcome):\n"
        "    pathlib.Path('calls').open('a').write('tell\\n')\n"
        "    pathlib.Path('outcome.json').write_text(json.dumps(outcome))\n"
    )
    bench.changes["code"] = str(code)
    run = bench.create(callbacks=["hooks:broken", "hooks:tell"])
    promoted = r"version 1 promoted .*hooks:broken: ValueError: no such channel"
    with pytest.raises(CallbackFailed, match=promoted):
        bench.execute(run)
    assert bench.champion() == 1
    outcome = json.loads((code / "outcome.json").read_text())
    assert {"model": bench.model, "promoted": True, "challenger": 1}.items() <= outcome.items()
    assert "Callback hooks:broken failed: ValueError: no such channel" in bench.report(run)
    with pytest.raises(CallbackFailed):
        bench.execute(run)
    assert (code / "calls").read_text().split() == ["broken", "tell", "broken"]
    assert (len(bench.moves()), len(bench.trained)) == (1, 1)


def test_a_run_that_is_stopped(bench: Bench) -> None:
    """It promotes nothing, says so, and decides when it is taken up again."""
    bench.promote()

    def stop(stopping: StopHandler) -> None:
        stopping.ask("time budget", "60 s are over")
        assert stopping.wait(WAIT_SECONDS)

    bench.act = stop
    run = bench.create()
    result = bench.execute(run)
    assert not result.promoted
    assert result.stop_reason == "time budget (60 s are over)"
    assert "**stopped: time budget (60 s are over)**" in bench.report(run)
    assert bench.champion() == 1
    bench.act = lambda stopping: None
    assert bench.execute(run).promoted
    assert len(bench.validated) == 1
