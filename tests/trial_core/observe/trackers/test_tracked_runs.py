"""What trackers show of whole runs."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
from pathlib import Path
from threading import Timer
from typing import Any

import psutil
import pytest

from tests.support.browser import Browser
from tests.support.cli import ROOT, trialflow, write_experiment
from tests.support.driving import TRIAL, drive
from tests.support.flow import breaking, one_slot
from tests.support.mlflow_server import MlflowServer
from tests.support.own_lines_tracker import CHILD, LinesTracker
from tests.support.prefect import PrefectServer
from tests.support.slots import TOY
from tests.support.trackers import in_tensorboard, in_trackio, in_wandb
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig
from trial_core.errors import ConfigError
from trial_core.observe.trackers.journal import FOLDER, JOURNAL, JournalWriter
from trial_core.observe.trackers.records import AnyRecord, Metrics
from trial_core.observe.trackers.sender import KILLED_PATIENCE_SECONDS
from trial_core.observe.trackers.stored_journal import sync_trackers
from trial_core.processes.machine.run_dirs import locked_run_dir


@pytest.mark.long
def test_each_tracker_shows_one_run_of_all_attempts(
    mlflow: MlflowServer, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank dies, and the next run is on another machine: every point is there, and once."""
    for limit in ("observe.trackers.tracking.PATIENCE_SECONDS", "schedule.ending.TOTAL_SECONDS"):
        monkeypatch.setattr(f"trial_core.{limit}", 600.0)  # importing them takes time
    trackers: list[Any] = [
        {"mlflow": {"tracking_uri": mlflow.url, "tags": {"team": "vision"}}},
        {"wandb": {"mode": "offline"}}, "tensorboard", "trackio",
    ]  # fmt: skip
    first = one_slot(
        here, 12, trackers=trackers, max_restarts=1, name=f"toy-{here.name}",
        hyperparameters=breaking(here, "kill", 6, model={"width": 16}),
    )  # fmt: skip
    drive(first)
    monkeypatch.setenv("TRIALFLOW_HOME", str(here / "other-home"))
    longer = {
        **first.model_dump(mode="json"),
        "searcher": {**first.searcher.model_dump(mode="json"), "max_length": {"batches": 20}},
    }
    result = drive(type(first).from_mapping(longer))
    assert result.batches_trained == 20

    run = mlflow.run(TRIAL, first.name)
    homes = [here / "home" / TRIAL, here / "other-home" / TRIAL]
    stored = here / "checkpoints" / "runs" / TRIAL / "tensorboard" / "driver"
    shown = {
        "mlflow": mlflow.points(TRIAL, first.name)["training/loss"],
        "wandb": in_wandb([home / FOLDER / "wandb" for home in homes], "training/loss"),
        "tensorboard": in_tensorboard(stored, "training/loss"),
        "trackio": in_trackio(here / "trackio", first.name, "training/loss"),
    }
    for name, points in shown.items():
        assert [step for step, _ in points] == [4, 8, 12, 16, 20], name
        assert points[-1][1] == pytest.approx(result.training_metrics["loss"]), name
    assert mlflow.points(TRIAL, first.name)["validation/loss"] == [
        (12, pytest.approx(mlflow.points(TRIAL, first.name)["validation/loss"][0][1])),
        (20, result.validation_metrics["loss"]),
    ]

    assert mlflow.points(TRIAL, first.name)["progress/samples"][-1] == (20, 40.0)
    assert run.data.params["model.width"] == "16"
    assert run.data.params["trialflow.searcher.max_length.batches"] == "12"  # they never change
    assert run.data.tags["changed.trialflow.searcher.max_length.batches"] == "20"
    assert run.data.tags["team"] == "vision"
    assert run.data.tags["trialflow.experiment"] == first.name
    assert run.data.tags["version.torch"]
    assert run.info.status == "FINISHED"
    newest = CheckpointStore(first.checkpoint_storage.url).list()[-1]
    assert run.data.tags["trialflow.checkpoint_digest"] == newest.digest
    assert run.data.tags["trialflow.checkpoint"].endswith(newest.uuid)
    artifacts = mlflow.client.list_artifacts(run.info.run_id)
    assert {each.path for each in artifacts} == {"checkpoints.json", "report.html"}
    listed = mlflow.client.download_artifacts(run.info.run_id, "checkpoints.json", str(here))
    there = {each.uuid for each in CheckpointStore(first.checkpoint_storage.url).list()}
    assert set(json.loads(Path(listed).read_text())) == there


@pytest.mark.long
def test_what_a_server_does_not_get_is_sent_by_the_next_run(
    mlflow: MlflowServer, here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that is down neither stops the run nor loses a point."""
    trackers = [{"mlflow": {"tracking_uri": mlflow.url, "experiment": here.name}}]
    mlflow.kill()
    with caplog.at_level(logging.WARNING):
        assert drive(one_slot(here, 8, trackers=trackers)).batches_trained == 8
    said = [line for line in caplog.messages if "mlflow" in line]
    assert len(said) == 2, said
    assert "kept and sent later" in said[0]
    assert "the trial's next run sends them, or trialflow runs sync" in said[1]
    mlflow.start()
    drive(one_slot(here, 12, trackers=trackers))
    experiment = mlflow.client.get_experiment_by_name(here.name)
    (run,) = mlflow.client.search_runs([experiment.experiment_id])
    history = mlflow.client.get_metric_history(run.info.run_id, "training/loss")
    assert [each.step for each in history] == [4, 8, 12]


def test_a_tracker_of_ones_own_that_hangs(
    here: Path, own_package: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """It is found by its entry point, and the run's end waits for it for a limited time. The report
    says what it lacks, wherever it is shown, until it has it."""
    monkeypatch.setattr("trial_core.observe.trackers.tracking.PATIENCE_SECONDS", 0.1)
    lines, hang = here / "lines", here / "hang"
    hang.touch()
    trackers = [{"lines": {"file": str(lines), "hang": str(hang)}}]
    shown: list[str] = []
    done = drive(one_slot(here, 8, trackers=trackers), publish=shown.append)
    assert done.batches_trained == 8
    assert not lines.exists()
    assert any("tracker lines has not got" in line for line in caplog.messages)
    local = Path(_known(done.report_path))
    stored = CheckpointStore(f"file://{here}/checkpoints").storage.read(f"runs/{TRIAL}/report.md")
    page = local.with_name("report.html").read_text()
    for report in (shown[-1], local.read_text(), _known(stored).decode(), page):
        assert "tracker lines has not got" in report
        assert f"trialflow runs sync {TRIAL}" in report
    left = [
        each for each in psutil.process_iter(["cmdline"]) if CHILD in (each.info["cmdline"] or ())
    ]
    assert left == []
    hang.unlink()
    monkeypatch.setattr("trial_core.observe.trackers.tracking.PATIENCE_SECONDS", 60.0)
    drive(one_slot(here, 12, trackers=trackers))
    assert [step for step, _ in LinesTracker.points(lines, "training/loss")] == [4, 8, 12]
    samples = LinesTracker.points(lines, "progress/samples")
    assert samples == [(step, 2 * step) for step in (4, 8, 12)]  # also of the resumed run
    assert "has not got" not in local.read_text()


def _known(value: Any) -> Any:
    assert value is not None
    return value


def test_a_core_api_script_is_tracked(here: Path, own_package: Path) -> None:
    """As a trial is: what it reports, and its checkpoints."""
    lines = here / "lines"
    config = one_slot(
        here, 6, entrypoint="python core_script.py 6", code=TOY,
        hyperparameters={"record": str(here), "store_every": 2},
        trackers=[{"lines": {"file": str(lines)}}],
        searcher={"name": "single", "metric": "loss", "max_length": {"batches": 6}},
    )  # fmt: skip
    drive(config)
    kinds = [json.loads(line)["type"] for line in lines.read_text().splitlines()]
    assert kinds[-1] == "RunEnded"
    assert {"Began", "Metrics", "Committed"} <= set(kinds)


@pytest.mark.parametrize(
    ("trackers", "problem"),
    [
        ([{"mlflow": {"password": "hunter22"}}], "passwords and keys are not written here"),
        ([{"mlflow": {"tracking_uri": "https://me:hunter22@host"}}], "passwords and keys"),
        ([{"trackio": {"server_url": "https://host/?write_token=hunter22"}}], "nor URLs"),
        ([{"mlflow": {"tracking_uri": "http://hunter22@host"}}], "nor URLs"),
        ([{"mlflow": {"tags": {"code": ["https://hunter22@host/x.git"]}}}], "nor URLs"),
        ([{"lines": {"limit": 2**70}}], "limit: .*does not fit into 64 bits"),
        (["mlflow", {"mlflow": {}}], "mlflow is there twice"),
        ([{"mlflow": {}, "wandb": {}}], "expected one tracker with its options"),
        ({"mlflow": {}}, "expected a list of trackers"),
    ],
)
def test_secrets_and_other_forms_are_refused(here: Path, trackers: Any, problem: str) -> None:
    """And no message shows the secret."""
    given = {**one_slot(here, 4).model_dump(mode="json"), "trackers": trackers}
    with pytest.raises(ConfigError, match=problem) as refusal:
        ExperimentConfig.from_mapping(given)
    assert "hunter22" not in str(refusal.value)


@pytest.mark.parametrize(
    ("trackers", "problem"),
    [
        (["mlfow"], "no tracker is named 'mlfow'; did you mean \"mlflow\"?"),
        ([{"wandb": {"projct": "gpt"}}], "unknown field 'projct'; did you mean \"project\"?"),
        ([{"mlflow": {"artifacts": "no"}}], 'artifacts: expected true or false, got "no"'),
        (
            [{"mlflow": {"registered_model": 7}}],
            "trackers.mlflow.registered_model: expected true or false or text, got 7",
        ),
        ([{"wandb": {"tags": "gpt"}}], 'trackers.wandb.tags: expected a list, got "gpt"'),
    ],
)
def test_unknown_names_are_refused_before_training(here: Path, trackers: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        drive(one_slot(here, 4, trackers=trackers))
    assert problem in str(refusal.value)
    assert not (here / "home" / TRIAL / FOLDER / JOURNAL).exists()


def test_a_package_that_fails_is_refused_before_training(here: Path, own_package: Path) -> None:
    """With what it raises."""
    (own_package / "own_lines_tracker.py").write_text("import a_package_that_is_not_installed")
    with pytest.raises(ConfigError) as refusal:
        drive(one_slot(here, 4, trackers=["lines"]))
    assert "trackers: lines cannot be loaded from own_lines_tracker:LinesTracker" in str(
        refusal.value
    )
    assert "a_package_that_is_not_installed" in str(refusal.value)


@pytest.mark.long
def test_a_full_disk_does_not_end_the_run(
    here: Path, own_package: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said, once, and what follows is tracked again."""
    lines, failed = here / "lines", []
    append = JournalWriter.append

    def full(journal: JournalWriter, record: AnyRecord) -> None:
        if isinstance(record, Metrics) and record.batches == 4:
            failed.append(record)
            raise OSError(28, "No space left on device")
        append(journal, record)

    monkeypatch.setattr(JournalWriter, "append", full)
    drive(one_slot(here, 8, trackers=[{"lines": {"file": str(lines)}}]))
    assert failed
    assert len([line for line in caplog.messages if "lack a part" in line]) == 1
    assert [step for step, _ in LinesTracker.points(lines, "training/loss")] == [8]


@pytest.mark.long
def test_sync_waits_as_long_as_it_is_told(
    here: Path, own_package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a tracker that is slow: longer than for one whose driver was killed."""
    monkeypatch.setattr("trial_core.observe.trackers.tracking.PATIENCE_SECONDS", 0.1)
    lines, hang = here / "lines", here / "hang"
    hang.touch()
    drive(one_slot(here, 4, trackers=[{"lines": {"file": str(lines), "hang": str(hang)}}]))
    store = CheckpointStore(f"file://{here}/checkpoints")
    Timer(KILLED_PATIENCE_SECONDS + 5, hang.unlink).start()
    with locked_run_dir(TRIAL) as folder:
        before, after = sync_trackers(store, TRIAL, folder, 60.0, print, logging.getLogger())
    assert (before.keys(), after) == ({"lines"}, {})


@pytest.mark.long
@pytest.mark.server
def test_the_last_line_names_a_tracker_that_lacks_records(
    here: Path, own_package: Path, prefect_server: PrefectServer
) -> None:
    """On the terminal, with the command that sends them, which then does."""
    lines, down = here / "lines", here / "down"
    down.touch()
    path = write_experiment(here, trackers=[{"lines": {"file": str(lines), "down": str(down)}}])
    variables = {**prefect_server.environment, "PYTHONPATH": f"{ROOT}:{own_package}"}
    done = trialflow(here, "train", str(path), "--quiet", variables=variables)
    assert done.returncode == 0, done.stderr
    last = done.stderr.splitlines()[-1]
    assert re.match(r"warning: tracker lines has not got \d+ records; the trial's next run", last)
    down.unlink()
    command = last.partition("trialflow ")[2].split()
    sent = trialflow(here, *command, variables=variables)
    assert (sent.returncode, sent.stderr) == (0, "")
    assert [step for step, _ in LinesTracker.points(lines, "training/loss")] == [4, 8]


@pytest.mark.long
def test_sync_sends_what_a_lost_machine_has_left(here: Path, own_package: Path) -> None:
    """`trialflow runs sync` needs the storage alone: the run's machine is gone."""
    lines, down = here / "lines", here / "down"
    down.touch()
    drive(one_slot(here, 8, trackers=[{"lines": {"file": str(lines), "down": str(down)}}]))
    shutil.rmtree(here / "home")

    def sync() -> subprocess.CompletedProcess[str]:
        place = f"file://{here}/checkpoints"
        variables = {"PYTHONPATH": f"{ROOT}:{own_package}"}
        return trialflow(here, "runs", "sync", TRIAL, "--storage", place, variables=variables)

    failed = sync()
    assert failed.returncode == 1, failed.stderr
    assert "could not be sent" in failed.stdout
    down.unlink()
    assert "records sent" in sync().stdout
    assert [step for step, _ in LinesTracker.points(lines, "training/loss")] == [4, 8]
    again = sync()
    assert (again.returncode, again.stdout) == (0, f"the trackers of {TRIAL} have got everything\n")


@pytest.mark.long
@pytest.mark.browser
def test_mlflows_page_shows_the_run(mlflow: MlflowServer, here: Path, browser: Browser) -> None:
    """Its curves. The picture of the guide is of this page (TRIALFLOW_SCREENSHOTS)."""
    drive(one_slot(
        here, 400, name="gpt", scheduling_unit=20, min_checkpoint_period={"batches": 40},
        min_validation_period={"batches": 40}, trackers=[{"mlflow": {"tracking_uri": mlflow.url}}],
    ), trial="gpt-0000beef")  # fmt: skip
    info = mlflow.run("gpt-0000beef", "gpt").info
    page = f"{mlflow.url}/#/experiments/{info.experiment_id}/runs/{info.run_id}/model-metrics"
    browser.open(page, expecting="stall_seconds")
    browser.type_into("Search metric charts", "loss")
    browser.wait_for(lambda: "stall_seconds" not in browser.text, "end of the search")
    browser.wait_for(lambda: "validation" in browser.text, "the validations' curve")
    assert "training" in browser.text
    if folder := os.environ.get("TRIALFLOW_SCREENSHOTS"):
        browser.save_png(Path(folder) / "mlflow.png", is_changing=True)
