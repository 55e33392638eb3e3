"""`trialflow train --test` tries a trial on real ranks, and leaves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import write_experiment
from tests.support.driving import warm
from tests.support.manifests import new_manifest
from tests.support.slots import lines
from trial_core.checkpoint.store import CheckpointStore
from trial_core.processes.slots.fork_server import ForkServer
from trialflow.deployments.cli.main import main
from trialflow.flows.server import embedded_server

pytestmark = pytest.mark.slots

SCRIPT = {"searcher": {"metric": "loss"}}


def stored(folder: Path) -> set[Path]:
    return {file for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def here(tmp_path: Path, warm_server: ForkServer) -> Iterator[Path]:
    """A folder for all files of runs."""
    with warm(warm_server, tmp_path / "home"):
        yield tmp_path


@pytest.fixture
def storage(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A storage with a checkpoint of another trial, which runs need no server to use."""
    monkeypatch.setattr(embedded_server, "prefect_api", lambda **_: pytest.fail("a server starts"))
    store = CheckpointStore(f"file://{here}/storage")
    store.storage.check_usable()
    store.commit(new_manifest(3, trial="toy-0000beef", experiment="toy"))
    return here / "storage"


def try_out(here: Path, storage: Path, **fields: Any) -> int:
    given = {"record": str(here), **fields.pop("hyperparameters", {})}
    path = write_experiment(here, checkpoint_storage=str(storage), hyperparameters=given, **fields)
    return main(["train", str(path), "--test"])


@pytest.mark.parametrize(
    ("fields", "said", "batches"),
    [
        ({"searcher": {"metric": "loss", "max_length": {"epochs": 9}}}, "2 batches", [0, 1]),
        pytest.param(
            {"entrypoint": "pytorch_trials:Small", "hyperparameters": {"global_batch_size": 4}},
            "2 batches", None, marks=pytest.mark.long, id="PyTorchTrial",
        ),
        pytest.param(
            {"entrypoint": "python trainer_script.py 50", **SCRIPT}, "2 batches", [0, 1],
            marks=pytest.mark.long, id="script with Trainer",
        ),
    ],
)  # fmt: skip
def test_a_trial_is_tried_with_a_restore_and_nothing_is_kept(
    fields: dict[str, Any], said: str, batches: list[int] | None,
    here: Path, storage: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Batch 0, and after a restore from the storage batch 1, whatever the experiment's length."""
    before = stored(storage)
    assert try_out(here, storage, **fields) == 0
    shown = "".join(capsys.readouterr())
    assert "in the test's batch" not in shown
    assert f"the test has passed: {said} trained (" in shown
    assert "a checkpoint saved, restored and deleted" in shown
    assert "fetch-checkpoint @1" in shown
    if batches is not None:
        assert [line[0] for line in lines(here, "samples", 0)] == batches
    assert stored(storage) == before
    assert stored(here / "home") == set()


@pytest.mark.parametrize("steps", [False, pytest.param(True, marks=pytest.mark.long)])
def test_weights_that_are_not_trained_are_named(
    here: Path, storage: Path, capsys: pytest.CaptureFixture[str], steps: bool
) -> None:
    """Once, by the first of the two batches. The test passes: it may be meant."""
    hyperparameters = {"global_batch_size": 4, "steps": steps}
    resources = {"slots_per_trial": 1}
    trial = "pytorch_trials:Untrained"
    fields = {"entrypoint": trial, "hyperparameters": hyperparameters, "resources": resources}
    assert try_out(here, storage, **fields) == 0
    shown = "".join(capsys.readouterr())
    unused = "2 parameters got no gradient in the test's batch: spare.bias, spare.weight; "
    assert shown.count(unused) == 1
    assert shown.count("no weight has changed") == (0 if steps else 1)


@pytest.mark.long
def test_a_script_with_its_own_loop_is_told_to_save_and_end(
    here: Path, storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At its first report, and again after it has restored."""
    before = stored(storage)
    every = {"store_every": 1}
    script = "python core_script.py 100000"
    assert try_out(here, storage, entrypoint=script, hyperparameters=every, **SCRIPT) == 0
    assert "a checkpoint saved, restored and deleted" in capsys.readouterr().out
    seen = lines(here, "script", 0)
    (resumed,) = [line["resumed"] for line in seen if "resumed" in line]
    assert sum("preempted" in line for line in seen) == 2
    assert seen[-1]["preempted"] > resumed
    assert stored(storage) == before


@pytest.mark.long
def test_what_a_failed_test_has_stored_is_deleted(
    here: Path, storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The logs, which the error names, stay. The trial raises in the batch after the restore."""
    before = stored(storage)
    assert try_out(here, storage, hyperparameters={"do": "raise", "at_batch": 1}) == 1
    error = capsys.readouterr().err
    assert error.count("raise RuntimeError") == 1
    assert "--resume" not in error
    assert stored(storage) == before
    assert "rank-0.log" in [file.name for file in stored(here / "home")]


def test_a_test_continues_no_trial(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is of a new trial."""
    assert main(["train", str(write_experiment(here)), "--test", "--resume"]) == 2
    assert "--test tries a new trial: leave out --resume" in capsys.readouterr().err
