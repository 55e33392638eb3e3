"""Flows of a user's that are composed of trialflow's: results go from one step to the next."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.exceptions import ParameterTypeError
from prefect.utilities.callables import parameter_schema
from safetensors import safe_open

from tests.support.flow import one_slot
from tests.support.prefect import ROOT, PrefectServer, isolated
from tests.support.prefect_worker import assert_a_cancel_saves
from tests.support.slots import lines
from tests.support.ways_to_stop import Stage, Worker, own_flow_in_tasks
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig
from trial_core.errors import CheckpointNotFound, ConfigError
from trial_core.export.export_checkpoint import ExportRequest
from trial_core.models.registry import Registry
from trialflow import TrialResult, evaluate, export, fetch, promote, train
from trialflow.flows.server.embedded_server import flush
from trialflow.tasks.checkpoint_use import checkpoint_of

pytestmark = [pytest.mark.slots, pytest.mark.server]

EXAMPLE = ROOT / "examples" / "nightly"
LIMIT_SECONDS = 240.0
# What a person reads as trouble; of the third, Prefect's events service has logged hundreds.
TROUBLE = re.compile(r"ERROR|CRITICAL|Traceback|stopped service|Error logging")


def run_alone(folder: Path, *command: str) -> str:
    """What a script prints that has no server."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=isolated(folder) | {"TRIALFLOW_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT)},
        text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        timeout=LIMIT_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.long  # test_results_go_from_step_to_step has the same steps
def test_the_example_trains_twice_and_promotes_the_better_one(tmp_path: Path) -> None:
    """As a script, with a server of its own that leaves the terminal alone."""
    here = tmp_path / "nightly"
    shutil.copytree(EXAMPLE, here, ignore=shutil.ignore_patterns("data", "models", "trialflow*"))
    said = run_alone(here, "nightly.py")
    assert TROUBLE.search(said) is None, said
    assert "version 1 of demand is the champion" in said
    (written,) = (here / "models").glob("*.safetensors")
    store = CheckpointStore(f"file://{here}/home/checkpoints")
    champion = Registry(store).version("demand", 1)
    losses = {m.uuid: m.metrics["validation"]["loss"] for m in store.list() if m.is_validated}
    trials = {manifest.trial for manifest in store.list()}
    assert len(trials) == 2
    last = [store.newest(trial).uuid for trial in trials]  # type: ignore[union-attr]
    assert champion.checkpoint == min(last, key=losses.__getitem__)
    with safe_open(written, "pt") as file:
        assert file.metadata()["trialflow.checkpoint"] == champion.checkpoint


@pytest.mark.long
def test_prefects_temporary_server_logs_no_trouble(tmp_path: Path) -> None:
    """Of a flow that trains twice; and it may take longer than Prefect's 20 s to start."""
    config = one_slot(tmp_path, 4)
    (tmp_path / "toy.json").write_text(config.model_dump_json())
    (tmp_path / "own.py").write_text(
        "from pathlib import Path\n"
        "from prefect import flow\n"
        "from prefect.settings import get_current_settings\n"
        "from trialflow import ExperimentConfig, train\n"
        "@flow\n"
        "def own():\n"
        "    config = ExperimentConfig.model_validate_json(Path('toy.json').read_text())\n"
        "    return [train(config).trial, train(config).trial]\n"
        "settings = get_current_settings().server.ephemeral\n"
        "print('LIMIT', settings.startup_timeout_seconds, len({*own()}))\n"
    )
    said = run_alone(tmp_path, "own.py")
    assert TROUBLE.search(said) is None, said
    assert "LIMIT 120 2\n" in said
    assert "| INFO    | Task run 'train-workload [0→4]'" in said


@pytest.mark.long
def test_results_go_from_step_to_step(prefect_server: PrefectServer, here: Path) -> None:
    """Train, evaluate, promote, export, fetch, and train on from there; and once more, in a retry.

    The second attempt trains no batch again, makes no second move, and writes the same file.
    """
    attempts: list[Any] = []
    target, folder = here / "model.safetensors", here / "fetched"
    config = one_slot(here, 8, hyperparameters={"record": str(here)})
    later = one_slot(here, 4, name="later")

    @flow(retries=1)
    def own() -> None:
        first = train(config)
        evaluated = evaluate(first)
        metrics = evaluated.metrics
        assert evaluate(evaluated).metrics == metrics
        move = promote(first, "toy", why="better")
        written = export(first, target)
        fetched = fetch(first, folder, checkpoint="latest")
        second = train(later, start=first)
        attempts.append((first.trial, metrics, move, written.path, fetched, second.trial))
        if len(attempts) == 1:
            raise RuntimeError("after all of it")

    try:
        own()
    finally:
        flush()
    assert attempts[0] == attempts[1]
    trial, metrics, move, *_, second = attempts[0]
    assert [line[0] for line in lines(here, "samples", 0)][:8] == [*range(8)]
    assert len(lines(here, "samples", 0)) == 8
    store = CheckpointStore(config.checkpoint_storage.url, experiment="toy")
    newest = store.newest(trial)
    assert newest is not None
    assert metrics == newest.metrics["validation"]
    assert Registry(store).version("toy", move.champion).checkpoint == newest.uuid
    assert len(Registry(store).moves("toy")) == 1
    assert {entry.path for entry in newest.files} <= {
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()
    }
    with safe_open(target, "pt") as file:
        assert file.metadata()["trialflow.checkpoint"] == newest.uuid
    started = store.newest(second)
    assert started is not None
    assert started.config["searcher"]["source_checkpoint_uuid"] == newest.uuid


@pytest.mark.long
def test_a_retry_keeps_to_what_others_have_changed(
    prefect_server: PrefectServer, here: Path
) -> None:
    """Between the attempts a person promotes another version, and a prune deletes the source."""
    config, later = one_slot(here, 8), one_slot(here, 4, name="later")
    store = CheckpointStore(config.checkpoint_storage.url)
    registry = Registry(store)
    trained: list[str] = []
    moves: list[int] = []

    @flow(retries=1)
    def own(source: str) -> None:
        trained.append(train(later, start=source).trial)
        moves.append(promote(f"latest:{trained[0]}", "toy", config=later).number)
        if len(trained) == 1:
            other = registry.register(
                "toy", others[0], metric=None, smaller_is_better=True, value=None
            )
            registry.promote("toy", other.number, why="a person's choice")
            store.storage.remove(others[1].name.key)
            raise RuntimeError("after all of it")

    try:
        first = train(config)
        others = store.list(first.trial)
        own(f"latest:{first.trial}")
    finally:
        flush()
    assert trained[0] == trained[1]
    assert moves == [1, 1]
    last = registry.last_move("toy")
    assert last is not None
    assert (last.number, last.champion) == (2, 2)
    started = store.newest(trained[1])
    assert started is not None
    assert started.config["searcher"]["source_checkpoint_uuid"] == others[1].uuid


def test_a_result_stands_for_the_checkpoint_of_its_metrics(
    prefect_server: PrefectServer, here: Path
) -> None:
    """Also if the trial has stopped later, and saved without a validation; else for the newest."""
    stops = {"do": "stop", "at_batch": 13}
    config = one_slot(here, 24, min_validation_period={"batches": 8}, hyperparameters=stops)
    try:
        stopped = train(config)
        evaluated = evaluate(stopped)
    finally:
        flush()
    assert (stopped.validated_at, evaluated.batches_trained) == (8, 8)
    assert stopped.checkpoint_at is not None
    assert stopped.checkpoint_at > 8
    assert evaluated.metrics == stopped.validation_metrics
    store = CheckpointStore(config.checkpoint_storage.url)
    store.storage.remove(store.open(evaluated.checkpoint_uuid).name.key)
    _, newest = checkpoint_of(stopped, None, None)
    assert newest == stopped.checkpoint_uuid


@pytest.mark.long  # test_parent_runs has it without ranks
def test_a_cancel_reaches_a_training_in_a_task(
    prefect_server: PrefectServer, shared_worker: Worker, tmp_path: Path
) -> None:
    """Of a user's flow on a worker: it saves, the flow is Cancelled, and no process is left."""
    with own_flow_in_tasks(Stage(prefect_server, shared_worker, tmp_path)) as scene:
        assert_a_cancel_saves(scene)


@pytest.mark.long
def test_an_async_flow_trains_beside_itself(prefect_server: PrefectServer, here: Path) -> None:
    """Called as it is, and twice in threads."""

    @flow
    async def own() -> list[Any]:
        first = train(one_slot(here, 4))
        others = [asyncio.to_thread(train, one_slot(here, 4, name=name)) for name in ("a", "b")]
        return [first, *await asyncio.gather(*others)]

    try:
        results = asyncio.run(own())
    finally:
        flush()
    assert [result.batches_trained for result in results] == [4, 4, 4]
    assert len({result.trial for result in results}) == 3


def test_forms_ask_for_no_result() -> None:
    """A deployment's form has the experiment's fields, as before."""
    for each in (evaluate, train):
        schema = parameter_schema(each.fn)
        config = schema.properties["config"]
        named = config.get("$ref", config.get("allOf", [{}])[0].get("$ref"))
        fields = schema.definitions[named.removeprefix("#/definitions/")]["properties"]
        assert fields.keys() == ExperimentConfig.model_fields.keys()
    start = parameter_schema(train.fn).properties["start"]
    assert {each["type"] for each in start["anyOf"]} == {"string", "null"}


def test_a_wrong_experiment_has_the_same_errors_in_each_flow(here: Path) -> None:
    """That a result may stand for it adds none."""
    wrong = one_slot(here, 4).model_dump(mode="json") | {"max_restartz": 3}
    said = []
    for each in (train, evaluate):
        with pytest.raises(ParameterTypeError) as caught:
            each.validate_parameters({"config": wrong})
        said.append(str(caught.value).splitlines())
    assert said[0] == said[1]
    assert said[0][1:] == [' - config.max_restartz: unknown field; did you mean "max_restarts"?']


def test_what_has_no_checkpoint_is_refused(prefect_server: PrefectServer, here: Path) -> None:
    """The error says what to give."""
    config = one_slot(here, 4)
    with prefect_server.configured():
        with pytest.raises(ConfigError, match="expected config=, the experiment whose storage"):
            promote("best", "toy")
        with pytest.raises(ConfigError, match="trial toy-1 has no experiment, as it is of no flow"):
            fetch(TrialResult("toy-1", 4, False, checkpoint_uuid="4f0c"), here / "x")
        bare = TrialResult("toy-1", 4, False, checkpoint_uuid="4f0c")
        with pytest.raises(ConfigError, match=r'to evaluate, evaluate\(config, "4f0c"\)'):
            evaluate(bare)
        with pytest.raises(ConfigError, match="or a reference to a checkpoint, got a NoneType"):
            promote(None, "toy")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="trial toy-1 has saved no checkpoint"):
            evaluate(TrialResult("toy-1", 4, False, config=config))
        with pytest.raises(ConfigError, match="dtype: expected fp32, 16bit, got '8bit'"):
            ExportRequest(None, dtype="8bit")  # type: ignore[arg-type]
        with pytest.raises(CheckpointNotFound, match="toy-1"):
            export("best:toy-1", here / "x.pt", config=config)
        other = TrialResult("toy-1", 4, False, checkpoint_uuid="4f0c", config=config)
        elsewhere = one_slot(here, 4, checkpoint_storage=f"file://{here}/elsewhere")
        with pytest.raises(ConfigError, match="and this experiment's storage is"):
            train(elsewhere, start=other)
        with pytest.raises(ConfigError, match="must have no password and no signature"):
            train(config, start="https://bucket.example/x.pt?X-Amz-Signature=4f0c")
    assert not (here / "x.pt").exists()
