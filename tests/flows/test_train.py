"""The flow `train` on a real Prefect server and real ranks."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.flow import (
    breaking,
    one_slot,
    ranks,
    resumption,
    stages,
    train,
)
from tests.support.prefect import PrefectServer
from tests.support.s3 import S3Server
from tests.support.slots import lines, toy_config
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import RankFailed, StorageError
from trial_core.observe.ledger.stored_ledger import read_ledger

pytestmark = [pytest.mark.slots, pytest.mark.server]

LIMIT_SECONDS = 60.0


def delay_first_commit(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the first upload last until batch 10 is trained; a file that exists once it runs."""
    commit, upload_runs = CheckpointStore.commit, here / "upload-runs"

    def delayed(store: CheckpointStore, manifest: Manifest, *arguments: Any) -> None:
        upload_runs.touch()
        deadline = time.monotonic() + LIMIT_SECONDS
        while len(lines(here, "samples", 0)) <= 10:
            assert time.monotonic() < deadline, "training waits for the upload"
            time.sleep(0.01)
        commit(store, manifest, *arguments)

    monkeypatch.setattr(CheckpointStore, "commit", delayed)
    return upload_runs


def test_the_stages_of_a_run(
    here: Path, prefect_server: PrefectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the server shows them: in order, by name, with the upload beside training.

    A hook that the trial overrides is a task, but for those of each workload and checkpoint. The
    run leaves a report and an intact checkpoint.
    """
    upload_runs = delay_first_commit(here, monkeypatch)
    config = toy_config(
        here, 20, scheduling_unit=10, min_validation_period={"batches": 10},
        checkpoint_policy="all", hyperparameters={
            "record": str(here), "at_batch": 19, "do": "wait", "wait_for": str(upload_runs),
        },
    )  # fmt: skip
    before = ranks()
    result = train(config)

    seen = stages(prefect_server, result.flow_run_id, "callbacks on_trial_shutdown @20")
    by_name = {stage.name: stage for stage in seen}
    assert {stage.state for stage in seen} == {"Completed"}
    assert [stage.name for stage in seen if "upload" not in stage.name] == [
        "build-trial",
        "callbacks on_trial_startup @0",
        "build-loaders @0",
        "callbacks on_training_start @0",
        "check-metrics",
        "train-workload [0→10]",
        "validate @10",
        "callbacks on_validation_end @10",
        "checkpoint-save @10",
        "train-workload [10→20]",
        "validate @20",
        "callbacks on_validation_end @20",
        "checkpoint-save @20",
        "callbacks on_trial_shutdown @20",
    ]
    assert Counter(stage.name for stage in seen if "upload" in stage.name) == {
        "checkpoint-upload @10": 1,
        "checkpoint-upload @20": 1,
    }
    upload, training = by_name["checkpoint-upload @10"], by_name["train-workload [10→20]"]
    assert upload.began < training.ended
    assert training.began < upload.ended

    hooks = [line["hook"] for line in lines(here, "hooks", 1)]
    assert hooks.count("on_checkpoint_upload_end") == 2
    assert hooks[0] == "on_trial_startup"
    assert hooks[-1] == "on_trial_shutdown"
    assert result.training_metrics["rank"] == 0.5

    store = CheckpointStore(config.checkpoint_storage.url)
    manifest = store.open(result.checkpoint_uuid)
    assert store.find_damage(manifest.uuid, manifest.files) == []
    assert manifest.metrics["validation"] == result.validation_metrics
    assert manifest.topology.world_size == 2
    assert {entry.rank for entry in manifest.files} == {0, 1}
    assert not (Path(result.run_dir) / "staging" / manifest.uuid / "rank-0").exists()

    report = Path(result.report_path).read_text()
    assert "**completed** · batch 20 of 20" in report
    assert 'title "loss: training (blue) ' in report
    assert 'title "learning rate: 0.01"' in report  # of the toy's optimizer
    page = Path(result.report_path).with_name("report.html").read_text()
    assert "<strong>completed</strong> · batch 20 of 20" in page
    (artifact,) = prefect_server.query(
        "artifacts/filter", {"artifacts": {"key": {"any_": [f"trial-{result.trial}"]}}}
    )
    assert artifact["data"] == report
    of_this_run = {"logs": {"flow_run_id": {"any_": [result.flow_run_id]}}, "limit": 10}
    log = prefect_server.query("logs/filter", {**of_this_run, "sort": "TIMESTAMP_ASC"})
    file = Path(result.report_path).with_name("report.html").as_uri()
    links = f"{file}, and in Prefect at {prefect_server.ui_url}/v2/artifacts/key/{artifact['key']}"
    lines_of_ours = [each["message"] for each in log if each["name"] == "prefect.flow_runs"]
    assert f"trial {result.trial}; its report is at {links}" in lines_of_ours[:2]
    assert ranks() <= before


def test_a_killed_rank_costs_only_unsaved_batches(
    here: Path, prefect_server: PrefectServer
) -> None:
    """SIGKILL at batch 13: a new rank resumes from the last committed checkpoint.

    Staged files of the killed rank are deleted. The ledger has the time of both launches.
    """
    config = one_slot(
        here, 16, max_restarts=1, hyperparameters=breaking(here, "kill", 13),
        cost={"per_slot_hour": 2.5},
    )  # fmt: skip
    began = time.monotonic()
    result = train(config)
    elapsed_seconds = time.monotonic() - began
    assert result.batches_trained == 16
    resumed_at = resumption(here, broke_at=13, end=16)
    build = f"build-loaders @{resumed_at}"
    names = [stage.name for stage in stages(prefect_server, result.flow_run_id, build)]
    assert f"fetch-checkpoint @{resumed_at}" in names
    manifests = CheckpointStore(config.checkpoint_storage.url).list()
    of_the_new_rank = {m.uuid for m in manifests if m.writer == manifests[-1].writer}
    staged = {folder.name for folder in (Path(result.run_dir) / "staging").iterdir()}
    assert staged <= of_the_new_rank

    (run,) = read_ledger(CheckpointStore(config.checkpoint_storage.url), result.trial).runs
    assert (run.is_over, run.slots, run.trained_to, run.per_slot_hour) == (True, 1, 16, 2.5)
    assert {"launch", "build", "restore", "train", "validate", "checkpoint_stall", "idle"} <= (
        run.slot_milliseconds.keys()
    )
    total_milliseconds = sum(run.slot_milliseconds.values())
    assert round(result.ledger["total_slot_seconds"] * 1000) == total_milliseconds
    assert total_milliseconds <= elapsed_seconds * 1000
    assert result.ledger["cost"] > 0
    report = Path(result.report_path)
    assert "| restore | " in report.read_text()
    assert "<td>restore</td>" in report.with_name("report.html").read_text()


@pytest.mark.long
def test_without_restarts_a_killed_rank_fails_the_run(here: Path) -> None:
    """The error has the rank and its signal; no process is left."""
    config = toy_config(
        here, 12, hyperparameters={"at_batch": 3, "do": "kill", "do_rank": 1}
    )  # fmt: skip
    before = ranks()
    with pytest.raises(RankFailed) as failure:
        train(config)
    assert (failure.value.rank, failure.value.signal_name) == (1, "SIGKILL")
    assert failure.value.during == "train-workload"
    assert ranks() <= before


@pytest.mark.long
def test_a_retry_of_the_flow_run_resumes(here: Path) -> None:
    """Prefect's retry keeps the flow run's id, and so the trial and its checkpoints."""
    result = train(one_slot(here, 16, hyperparameters=breaking(here, "exit", 13)), retries=1)
    assert result.batches_trained == 16
    resumption(here, broke_at=13, end=16)


@pytest.mark.long
def test_an_exception_before_training_is_not_retried(here: Path) -> None:
    """It would happen again, so no restart is spent on it."""
    config = one_slot(here, 8, max_restarts=5, hyperparameters={"at_batch": 0, "do": "raise"})
    with pytest.raises(RankFailed, match="RuntimeError: the toy was told to break"):
        train(config)
    logs = (next((here / "home").glob("toy-*")) / "logs" / "rank-0.log").read_text()
    assert logs.count("RuntimeError: the toy was told to break") == 1


def test_a_damaged_checkpoint_gives_way_to_an_older_one(here: Path) -> None:
    """A flipped bit in the newest checkpoint is found before training.

    The batches since the older one are trained again, and the ledger counts them as redone. The
    report says so.
    """
    config = one_slot(here, 8, hyperparameters={"record": str(here)})
    first = train(config)
    shard = next(Path(first.checkpoint_url.removeprefix("file://")).rglob("*optim_states.pt"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    longer = one_slot(here, 12, hyperparameters={"record": str(here)})
    result = train(longer, first.trial)
    assert result.batches_trained == 12
    assert "training continues from batch 4, checkpoint" in Path(result.report_path).read_text()
    assert [line[0] for line in lines(here, "samples", 0)] == [*range(8), *range(4, 12)]
    once, again = result.ledger["runs"]
    assert once["slot_seconds"]["redone"] == 0 < again["slot_seconds"]["redone"]
    assert min(once["slot_seconds"]["train"], again["slot_seconds"]["train"]) > 0


@pytest.mark.long
def test_memory_storage(here: Path) -> None:
    """Only the driver sees memory://, so it moves the files; a killed rank resumes from them."""
    config = one_slot(
        here, 16, checkpoint_storage="memory://toy", max_restarts=1,
        hyperparameters=breaking(here, "kill", 13),
    )  # fmt: skip
    result = train(config)
    resumption(here, broke_at=13, end=16)
    manifest = CheckpointStore("memory://toy").open(result.checkpoint_uuid)
    assert manifest.progress.batches_trained == 16


def resumes_over_s3(here: Path, server: S3Server) -> None:
    """Two ranks save to an S3 server; one is killed, and they resume from there."""
    storage = {"url": f"{server.new_bucket()}/runs", "options": server.options}
    config = toy_config(
        here, 16, checkpoint_storage=storage, max_restarts=1, scheduling_unit=4,
        min_checkpoint_period={"batches": 4}, hyperparameters=breaking(here, "kill", 13),
    )  # fmt: skip
    result = train(config)
    resumption(here, broke_at=13, end=16)
    store = CheckpointStore(storage["url"], server.options)
    manifests = store.list()
    assert {m.progress.batches_trained for m in manifests} == {4, 8, 12, 16}
    assert manifests[-1].uuid == result.checkpoint_uuid
    for manifest in manifests:
        assert store.find_damage(manifest.uuid, manifest.files) == []
    secret = server.options["secret"].encode()
    assert secret not in manifests[-1].to_json()
    written = [path for path in here.rglob("*") if path.is_file()]
    assert {"rank-0.log", "rank-1.log", "report.md"} <= {path.name for path in written}
    assert [path for path in written if secret in path.read_bytes()] == []


@pytest.mark.long
def test_s3_storage(here: Path, moto_s3: S3Server) -> None:
    """On moto's server."""
    resumes_over_s3(here, moto_s3)


@pytest.mark.long  # test_storage_block trains on it by default
@pytest.mark.gateway
def test_a_real_s3_gateway(here: Path, ceph_s3: S3Server) -> None:
    """On a real gateway."""
    resumes_over_s3(here, ceph_s3)


def test_storage_that_cannot_be_written(here: Path) -> None:
    """The error comes before any rank is launched."""
    (here / "file").write_text("in the way")
    config = one_slot(here, 4, checkpoint_storage=f"file://{here}/file/checkpoints")
    with pytest.raises(StorageError, match="file/checkpoints"):
        train(config)
    assert not (here / "home").exists()
