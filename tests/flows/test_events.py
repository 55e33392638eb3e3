"""The events of runs on a real server: their fields are those of docs/reference/events.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prefect import flow, runtime

from tests.flows.conftest import HungRun
from tests.support.events import check_fields, events_of, related
from tests.support.flow import one_slot, train
from tests.support.prefect import PrefectServer
from trial_core.checkpoint import layout
from trial_core.models.registry import Registry
from trial_core.observe.events.observers import Observer, Observers
from trialflow.flows.server.embedded_server import flush
from trialflow.tasks.checkpoint_use import promote, store_of
from trialflow.tasks.events import CHAMPION, COMMITTED, RESTARTING, STALLED

pytestmark = [pytest.mark.slots, pytest.mark.server]


def test_a_run_that_hangs_restarts_and_commits(
    here: Path, hung_run: HungRun, prefect_server: PrefectServer
) -> None:
    """One event of each fact, with all fields, of the right resources; also from a flow of one's
    own that promotes the checkpoint, twice."""
    config, result = hung_run.config, hung_run.result
    expected = [COMMITTED, STALLED, RESTARTING, COMMITTED]
    found = events_of(prefect_server, result.flow_run_id, len(expected))
    assert [each["event"] for each in found] == expected
    for event in found:
        check_fields(event)
        assert event["payload"]["trial"] == result.trial
        assert related(event)["experiment"] == "trialflow.experiment.toy"
        assert related(event)["flow"].startswith("prefect.flow.")
    _, stalled, restarting, last = found
    payload = last["payload"]
    assert payload["metrics"] == result.validation_metrics
    assert payload["metrics"]
    assert (payload["checkpoint"], payload["batches"]) == (result.checkpoint_uuid, 8)
    assert payload["files"] == result.checkpoint_url
    assert payload["size_bytes"] == store_of(config).open(payload["checkpoint"]).total_bytes
    of = last["resource"]["prefect.resource.id"]
    assert of == f"trialflow.checkpoint.{result.checkpoint_uuid}"
    assert related(last)["trial"] == f"trialflow.trial.{result.trial}"
    assert stalled["resource"]["prefect.resource.id"] == f"trialflow.trial.{result.trial}"
    assert (stalled["payload"]["during"], stalled["payload"]["seconds"]) == ("train-workload", 3)
    assert (restarting["payload"]["restart"], restarting["payload"]["max_restarts"]) == (1, 1)

    @flow
    def own() -> str:
        promote(result, "toy", why="by hand")
        promote(result, "toy", why="again")
        return str(runtime.flow_run.id)

    flow_run_id = own()
    flush()
    (promoted,) = events_of(prefect_server, flow_run_id, 1)
    assert promoted["event"] == CHAMPION
    check_fields(promoted)
    assert promoted["payload"]["why"] == "by hand"
    champion = Registry(store_of(config)).champion("toy")
    assert promoted["payload"]["version"] == champion.number
    assert related(promoted)["checkpoint"] == f"trialflow.checkpoint.{champion.checkpoint}"


def test_checkpoints_are_assets(
    here: Path, hung_run: HungRun, prefect_server: PrefectServer
) -> None:
    """Their materialization names the data and the source that the trial is made from, without
    passwords; Prefect's server keeps it as an event."""
    first = hung_run.result
    data = {"train": "s3://me:secret@data/train", "more": ["s3://data/a b", "none"], "rows": 3}
    config = one_slot(hung_run.folder, 4, data=data).starting_from(uuid=first.checkpoint_uuid)
    result = train(config)
    name = "prefect.asset.materialization.succeeded"
    (event,) = events_of(prefect_server, result.flow_run_id, 1, name)
    check_fields(event)
    store = store_of(config)
    folder = f"{store.url}/{layout.trial_folder(result.trial)}"
    assert event["resource"]["prefect.resource.id"] == folder
    sources = {
        each["prefect.resource.id"]
        for each in event["related"]
        if each["prefect.resource.role"] == "asset"
    }
    assert sources == {"s3://data/train", first.checkpoint_url}
    assert event["payload"]["checkpoint"] == result.checkpoint_uuid


def test_observers_get_every_call() -> None:
    """Also those that are added to `Observer` later."""
    called: list[tuple[str, str]] = []

    class Noting(Observer):
        def __init__(self, name: str) -> None:
            self._name = name

        def __getattribute__(self, name: str) -> Any:
            if not name.startswith("_"):
                called.append((self._name, name))
            return super().__getattribute__(name)

    both = Observers(Noting("first"), Noting("second"))
    both.restarting("killed", 1, max_restarts=2)
    both.notice("text")
    expected = [(each, name) for name in ("restarting", "notice") for each in ("first", "second")]
    assert called == expected
    called.clear()
    both.of_trial(0, "t-1").notice("text")  # each makes one, of another class
    assert called == [("first", "of_trial"), ("second", "of_trial")]
    names = [name for name in vars(Observer) if not name.startswith("_")]
    assert all(name in vars(Observers) for name in names)
