"""What MLflow's server is given, and what it refuses."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.mlflow_server import MlflowServer
from trial_core.observe.trackers.in_mlflow import MlflowTracker, quiet_client
from trial_core.observe.trackers.records import Committed, Described, Metrics, RunEnded
from trial_core.observe.trackers.tracker import RecordRefused, TrackedRun

pytestmark = pytest.mark.long  # test_tracked_runs has what a run shows there


def metrics(**values: float) -> Metrics:
    return Metrics(at=1.0, batches=4, samples=0, attempt=1, values={**values})


@pytest.fixture
def tracker(mlflow: MlflowServer, tmp_path: Path) -> MlflowTracker:
    """A tracker of an experiment that no other test uses."""
    run = TrackedRun("toy-1", tmp_path.name, tmp_path, tmp_path)
    return MlflowTracker({"tracking_uri": mlflow.url}, run)


def test_artifacts_that_cannot_be_written(
    mlflow: MlflowServer, tracker: MlflowTracker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run ends there all the same, and has its metrics and the checkpoint's link."""
    mlflow.client.create_experiment(tmp_path.name, artifact_location="file:///dev/null/artifacts")
    report = tmp_path / "report.html"
    report.touch()
    tracker.open("")
    tracker.send([
        Committed(at=1.0, batches=4, uuid="u", url="s3://b/u", size_bytes=1, digest="d"),
        Committed(at=1.0, batches=8, uuid="v", url="s3://b/v", size_bytes=1, digest="d"),
        metrics(loss=0.5),
        RunEnded(at=2.0, outcome="completed", why=""),
    ])  # fmt: skip
    run = mlflow.run("toy-1", tmp_path.name)
    assert (run.info.status, run.data.metrics) == ("FINISHED", {"loss": 0.5})
    assert run.data.tags["trialflow.checkpoint"] == "s3://b/v"
    said = [line.partition(" is left out")[0] for line in caplog.messages if "left out" in line]
    assert said == ["the list of checkpoints", "the report"]


def test_a_run_of_another_trial_is_not_continued(
    mlflow: MlflowServer, tracker: MlflowTracker, tmp_path: Path
) -> None:
    """The trial's storage says which run it had, and other people may write there."""
    run = TrackedRun("toy-2", tmp_path.name, tmp_path, tmp_path)
    other = MlflowTracker({"tracking_uri": mlflow.url}, run).open("")
    own = tracker.open(other)
    assert own != other
    tracker.send([metrics(loss=0.5)])
    assert mlflow.client.get_run(other).data.metrics == {}
    assert tracker.open(own) == own == tracker.open(other)


def test_trials_of_a_group_are_below_one_run(mlflow: MlflowServer, tmp_path: Path) -> None:
    """Their trackers are in several processes, and open their runs at the same time."""
    trials = [f"toy-{number}" for number in range(4)]
    options = {"tracking_uri": mlflow.url, "group": "it's a search"}
    mlflow.client.create_experiment(tmp_path.name)

    def opened(trial: str) -> str:
        run = TrackedRun(trial, tmp_path.name, tmp_path, tmp_path)
        return MlflowTracker(options, run).open("")

    with ThreadPoolExecutor(len(trials)) as pool:
        runs = list(pool.map(opened, trials))
    found = [mlflow.client.get_run(run) for run in (*runs, opened("toy-4"))]
    (parent,) = {run.data.tags["mlflow.parentRunId"] for run in found}
    there = mlflow.client.search_runs([found[0].info.experiment_id])
    assert {run.info.run_id for run in there} == {parent, *(run.info.run_id for run in found)}
    assert mlflow.client.get_run(parent).info.run_name == options["group"]


def test_names_that_mlflow_does_not_take(mlflow: MlflowServer, tracker: MlflowTracker) -> None:
    names = ["a//b", "c/", "/d", "../e", "f/./g", "..h", ".", "é:?", "i" * 249 + "/j"]
    tracker.open("")
    tracker.send([metrics(**dict.fromkeys(names, 0.5))])
    tracker.send([Described(at=1.0, parameters=dict.fromkeys(names, 1), tags={})])
    run = mlflow.run("toy-1", tracker.run.experiment)
    wanted = {"a/b", "c", "d", "e", "f/g", "__h", "_", "é:_", "i" * 249}
    assert set(run.data.metrics) == set(run.data.params) == wanted


def test_a_run_that_a_person_deletes_refuses_nothing_for_good(
    mlflow: MlflowServer, tracker: MlflowTracker
) -> None:
    """It may be restored, and then gets what it lacks. What another run refuses is refused."""
    from mlflow.exceptions import MlflowException

    run = tracker.open("")
    mlflow.client.delete_run(run)
    with pytest.raises(MlflowException, match="must be in the 'active' state"):
        tracker.send([metrics(loss=0.5)])
    mlflow.client.restore_run(run)
    tracker.send([metrics(loss=0.5)])
    assert mlflow.client.get_run(run).data.metrics == {"loss": 0.5}
    mlflow.client.log_param(run, "width", 16)
    with pytest.raises(RecordRefused):
        tracker.send([Described(at=1.0, parameters={"width": 32}, tags={})])


@pytest.mark.parametrize("user", ["hunter22", "me:hunter22"])
def test_what_is_remembered_of_the_server_is_no_secret(
    monkeypatch: pytest.MonkeyPatch, user: str
) -> None:
    """A token may stand where a user does. A later client finds it in the environment."""
    secret = f"https://{user}@mlflow.example.com/path@1"
    remembered = MlflowTracker.remembered({}, {"MLFLOW_TRACKING_URI": secret})
    assert remembered == {"tracking_uri": "https://mlflow.example.com/path@1"}
    monkeypatch.setenv("MLFLOW_TRACKING_URI", secret)
    assert quiet_client(remembered).tracking_uri == secret
