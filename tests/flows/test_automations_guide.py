"""The programs of docs/guides/automations.md on a real server, as they stand."""

from __future__ import annotations

import json
import os
import queue
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.deployments.runner import RunnerDeployment
from prefect.flows import load_flow_from_entrypoint

from tests.deployments.cli.stored import UUIDS
from tests.deployments.test_deploy_notifications import webhook as webhook
from tests.support.flow import one_slot, train
from tests.support.manifests import FILES, new_manifest, stage
from tests.support.prefect import ROOT, PrefectServer
from tests.support.snippets import SNIPPETS
from tests.support.waiting import WAIT_SECONDS, ask, until
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.upload import upload_files
from trial_core.config import ExperimentConfig
from trialflow import promote
from trialflow.flows.server.embedded_server import flush
from trialflow.flows.train import train as train_flow
from trialflow.tasks.events import RunEvents

pytestmark = [pytest.mark.slots, pytest.mark.server]

DOCUMENT = "docs/guides/automations.md"
PROGRAMS = {each.title: each.text for each in SNIPPETS if each.document == DOCUMENT}


@pytest.fixture
def no_automations(here: Path) -> Iterator[None]:
    """Deletes the automations and deployments that the test has made on the server of `here`."""

    def made() -> tuple[set[Any], set[Any]]:
        with get_client(sync_client=True) as client:
            deployments = {each.id for each in client.read_deployments()}
            return {each.id for each in client.read_automations()}, deployments

    before = made()
    yield
    automations, deployments = (now - then for now, then in zip(made(), before, strict=True))
    with get_client(sync_client=True) as client:
        for each in automations:
            client.delete_automation(each)
        for each in deployments:
            client.delete_deployment(each)


def program(here: Path, title: str, **changes: str) -> Path:
    """A program of the page as a file, with other words in the place of some."""
    text = PROGRAMS[title]
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (here / title).write_text(text)
    return here / title


def write_experiment(here: Path, config: ExperimentConfig) -> None:
    given = config.model_dump(mode="json", exclude_none=True)
    (here / "experiment.yaml").write_text(yaml.safe_dump(given))


def runs(server: PrefectServer, deployment: str, state: str) -> list[dict[str, Any]]:
    """The runs of a deployment in that state."""
    body = {"deployments": {"name": {"any_": [deployment]}}, "sort": "EXPECTED_START_TIME_ASC"}
    found: list[dict[str, Any]] = ask(server, "flow_runs/filter", body)
    return [run for run in found if run["state_type"] == state]


@contextmanager
def running(path: Path, server: PrefectServer) -> Iterator[None]:
    """A program that serves until the block ends."""
    environment = {**os.environ, **server.environment, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, path.name], cwd=path.parent, env=environment) as process:
        try:
            yield
        finally:
            process.terminate()


@pytest.mark.long
@pytest.mark.usefixtures("no_automations")
def test_a_committed_checkpoint_starts_a_run(here: Path, prefect_server: PrefectServer) -> None:
    """A served flow runs once for each checkpoint of that experiment, and evaluates it."""
    write_experiment(here, one_slot(here, 4))
    path = program(here, "judge.py", **{"experiment.gpt": "experiment.toy", '"gpt"': '"judged"'})
    with running(path, prefect_server):
        until(
            lambda: any(
                each["name"] == "a checkpoint is committed"
                for each in ask(prefect_server, "automations/filter", {})
            ),
            "the automation of the served flow",
        )
        train(one_slot(here, 4, name="other"))
        result = train(one_slot(here, 4))
        until(lambda: runs(prefect_server, "judged", "COMPLETED"), "the run of the served flow")
        (run,) = runs(prefect_server, "judged", "COMPLETED")
    assert run["parameters"] == {"checkpoint": result.checkpoint_uuid}


@pytest.mark.long
@pytest.mark.usefixtures("no_automations")
def test_the_other_recipes(
    here: Path,
    prefect_server: PrefectServer,
    webhook: tuple[str, queue.Queue[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Data start a training with their place, a run that hangs is posted, and a champion starts
    the flow that takes it into service."""
    monkeypatch.chdir(here)
    url, received = webhook
    config = one_slot(here, 4)
    write_experiment(here, config)
    cast(RunnerDeployment, train_flow.to_deployment(name="train")).apply()
    runpy.run_path(str(program(here, "train_on_data.py")))
    chat = "https://chat.example/hooks/trialflow"
    runpy.run_path(str(program(here, "tell_of_stalls.py", **{chat: url})))
    path = program(here, "serving.py")
    trigger = runpy.run_path(str(path))["promoted"]
    roll_out = load_flow_from_entrypoint(f"{path}:roll_out")
    deployed = cast(RunnerDeployment, roll_out.to_deployment(name="gpt", triggers=[trigger]))
    deployed.apply()
    runpy.run_path(str(program(here, "write_sales.py")))
    flush()
    until(lambda: runs(prefect_server, "train", "SCHEDULED"), "the run of train")
    (run,) = runs(prefect_server, "train", "SCHEDULED")
    assert run["parameters"]["config"]["data"]["url"] == "s3://my-data/sales"
    assert run["parameters"]["config"]["searcher"]["max_length"] == {"batches": 4}

    @flow
    def own() -> None:
        RunEvents(config, "toy-1").stalled("train-workload", 600, "no progress")
        promote(UUIDS[0], "gpt", config=config)

    store = CheckpointStore(config.checkpoint_storage.url)
    files = upload_files(store, UUIDS[0], stage(here / "staged", FILES), 0)
    store.commit(new_manifest(7, uuid=UUIDS[0], trial="toy-0a", files=files))
    own()
    flush()
    text = json.loads(received.get(timeout=WAIT_SECONDS))["text"]
    assert text.startswith("toy-1 hung for 600")
    assert text.endswith("in train-workload")
    until(lambda: runs(prefect_server, "gpt", "SCHEDULED"), "the run of roll-out")
    assert runs(prefect_server, "gpt", "SCHEDULED")[0]["parameters"] == {"model": "gpt"}
