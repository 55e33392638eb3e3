"""How runs of the flow `retrain` end that are stopped, taken for dead, or meet what is broken."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect.exceptions import Abort

import trialflow.flows.retrain
import trialflow.flows.retraining.outcome
from tests.support.prefect import PrefectServer
from tests.support.retraining import Bench
from tests.support.s3 import S3Server
from tests.support.waiting import ask
from trial_core.errors import CheckpointDamaged, Stopped, StorageError, Superseded
from trial_core.models.journal import Journal
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


def hooks(bench: Bench, text: str) -> Path:
    """Give the experiment a code folder with a module `hooks`."""
    code = bench.folder / "code"
    code.mkdir()
    (code / "hooks.py").write_text(text)
    bench.changes["code"] = str(code)
    return code


def time_is_over(stopping: StopHandler) -> None:
    stopping.ask("time budget", "60 s are over")
    assert stopping.wait(WAIT_SECONDS)


@pytest.mark.parametrize(
    "error",
    [
        StorageError("no way"),
        pytest.param(Superseded("attempt 2 has it"), marks=pytest.mark.long),
        pytest.param(Stopped("taken up again"), marks=pytest.mark.long),
    ],
)
def test_an_attempt_that_was_taken_for_dead(bench: Bench, error: Exception) -> None:
    """It wakes once its successor has promoted: the report says what became of the run."""
    bench.promote()
    run = bench.create()

    def sleep(stopping: StopHandler) -> None:
        bench.act = lambda stopping: None
        assert bench.beside(run).result(WAIT_SECONDS).promoted
        raise error

    bench.act = sleep
    with pytest.raises((type(error), Abort)):  # as soon as it knows that there is another
        bench.execute(run)
    assert "**version 2 promoted**" in bench.report(run)
    (artifact,) = ask(
        bench.server, "artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [str(run)]}}}
    )
    assert "**version 2 promoted**" in artifact["data"]


def test_what_is_overtaken_before_anything_is_decided(bench: Bench) -> None:
    """The report is its successor's to write."""
    run = bench.create()

    def overtaken(stopping: StopHandler) -> None:
        raise Superseded("attempt 2 has it")

    bench.act = overtaken
    with pytest.raises(Superseded):
        bench.execute(run)
    folder = f"models/{bench.model}/retrainings/{run}"
    assert [*bench.store.storage.sizes(folder)] == [f"{folder}/plan.json"]


def test_back_from_a_damaged_champion(bench: Bench) -> None:
    """Who obeys the error and rolls back retries the very run, which compares with that champion,
    and says so."""
    bench.promote(loss=0.9)
    bench.promote(loss=0.8)
    bench.damage(bench.registry.version(bench.model, 2).checkpoint)
    run = bench.create()
    with pytest.raises(CheckpointDamaged, match="a retry of this run then goes on against that"):
        bench.execute(run)
    bench.registry.rollback(bench.model)
    result = bench.execute(run)
    assert (result.promoted, result.champion, bench.champion()) == (True, 1, 3)
    said = "- planned against version 2, which was not validated before "
    assert said in bench.report(run)
    assert bench.execute(run) == result


@pytest.mark.long
def test_a_plan_that_was_begun_to_be_carried_out(bench: Bench) -> None:
    """Is not renewed: its champion is validated, and a decision against another was none of it."""
    bench.promote()
    run = bench.create()

    def die(stopping: StopHandler) -> None:
        raise RuntimeError("died")

    bench.act = die
    with pytest.raises(RuntimeError):
        bench.execute(run)
    bench.promote(loss=0.1)
    bench.act = lambda stopping: None
    result = bench.execute(run)
    assert (result.promoted, result.champion, bench.champion()) == (False, 1, 2)


def test_time_is_over_while_the_champion_is_validated(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends as one whose time is over while it trains, and goes on when it is run again."""
    bench.promote()

    def validate(
        config: Any, checkpoint: str, run: str, stopping: StopHandler, devices: Any
    ) -> None:
        time_is_over(stopping)
        raise Stopped("time budget (60 s are over), before the validation had ended")

    run = bench.create()
    with monkeypatch.context() as patch:
        patch.setattr(trialflow.flows.retrain, "evaluate_checkpoint", validate)
        result = bench.execute(run)
    assert (result.promoted, result.stop_reason) == (False, "time budget (60 s are over)")
    assert bench.state(run)[0] == "Completed"
    assert "**stopped: time budget (60 s are over)**" in bench.report(run)
    assert bench.execute(run).promoted


def test_time_is_over_when_all_is_trained(bench: Bench) -> None:
    """What has been paid for is compared, and promoted."""
    bench.promote()
    bench.act, bench.ends_anyway = time_is_over, True
    result = bench.run()
    assert (result.promoted, result.stop_reason, bench.champion()) == (True, None, 2)


@pytest.mark.long
def test_suspended_when_all_is_trained(bench: Bench) -> None:
    """Nothing is moved after somebody has said stop; the version is there for the next attempt."""

    def suspend(stopping: StopHandler) -> None:
        stopping.ask("suspended", "in Prefect")
        assert stopping.wait(WAIT_SECONDS)

    bench.act, bench.ends_anyway = suspend, True
    run = bench.create()
    with pytest.raises(Abort):
        bench.execute(run)
    assert (bench.champion(), len(bench.registry.versions(bench.model))) == (None, 1)
    bench.act = lambda stopping: None
    assert bench.execute(run).promoted


@pytest.mark.long
def test_a_callback_that_hangs(bench: Bench) -> None:
    """Is ended after its time, and said to have failed; what is promoted stays it."""
    hooks(bench, "import time\ndef hang(outcome):\n    time.sleep(600)\n")
    with pytest.raises(CallbackFailed, match="hooks:hang: it was broken off: it took longer than"):
        bench.run(callbacks=["hooks:hang"], callback_timeout_seconds=2)
    assert bench.champion() == 1


def test_callbacks_do_not_need_the_event(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server does not take it: callbacks are called all the same, the run fails with that, and
    a retry sends what is missing."""
    code = hooks(bench, "def tell(outcome):\n    open('calls', 'a').write('called\\n')\n")
    run = bench.create(callbacks=["hooks:tell"])

    def refuse(retraining: Any, outcome: Any) -> None:
        raise httpx.ConnectError("no server")

    with monkeypatch.context() as patch:
        patch.setattr(trialflow.flows.retraining.outcome, "tell", refuse)
        with pytest.raises(httpx.ConnectError):
            bench.execute(run)
    assert (code / "calls").read_text().split() == ["called"]
    assert "The run ended otherwise: failed: no server" in bench.report(run)
    assert bench.execute(run).promoted
    assert (code / "calls").read_text().split() == ["called"]
    assert len(bench.events()) == 1


@pytest.mark.long
def test_a_report_is_written_wherever_it_can_be(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The storage does not take it: the artifact and the file are there."""

    def refuse(notes: Journal, text: str) -> None:
        raise StorageError("no room")

    monkeypatch.setattr(Journal, "write_report", refuse)
    result = bench.run()
    assert "**version 1 promoted**" in Path(result.report_path).read_text()
    (artifact,) = ask(
        bench.server,
        "artifacts/filter",
        {"artifacts": {"flow_run_id": {"any_": [result.flow_run_id]}}},
    )
    assert "**version 1 promoted**" in artifact["data"]


@pytest.mark.gateway
def test_a_real_s3_gateway(
    prefect_server: PrefectServer,
    ceph_s3: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two retrainings with all that they note, register and move, and a way back."""
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path / "home"))
    place = {"url": f"{ceph_s3.new_bucket()}/runs", "options": ceph_s3.options}
    bench = Bench(prefect_server, tmp_path, place)
    bench.stand_in(monkeypatch)
    with prefect_server.configured():
        first = bench.run()
        bench.loss = 0.4
        run = bench.create()
        second = bench.execute(run)
        assert bench.execute(run) == second
    assert (first.promoted, second.promoted, second.champion) == (True, True, 1)
    assert [(move.champion, move.previous) for move in bench.moves()] == [(1, None), (2, 1)]
    assert "**version 2 promoted**" in bench.report(run)
    assert bench.registry.rollback(bench.model).champion == 1
    secret = ceph_s3.options["secret"]
    assert secret not in json.dumps([second.as_outcome(), bench.report(run)])
