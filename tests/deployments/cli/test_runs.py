"""`trialflow runs` on a local storage."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.json_types import PRINTED_BY_ALL
from tests.support.manifests import new_manifest
from tests.trial_core.observe.ledger.test_time_ledger import run_time
from trial_core.checkpoint import layout
from trial_core.checkpoint.json_objects import encode_json
from trial_core.checkpoint.store import CheckpointStore
from trial_core.observe.report.history import ReportHistory
from trial_core.observe.trackers.journal import FOLDER, JOURNAL, ORDER, JournalWriter, State
from trial_core.observe.trackers.records import Noted
from trial_core.observe.trackers.sender import SenderOrder
from trial_core.schedule.sequencer import Progress
from trialflow.deployments.cli import runs
from trialflow.deployments.cli.json_result import JsonResult
from trialflow.deployments.cli.main import main


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """A storage with a killed run of gpt-7, one that has ended, and a checkpoint of gpt-11."""
    store = CheckpointStore(f"file://{tmp_path}/storage")
    killed = run_time(1, is_over=False, slot_milliseconds={"train": 3_000_000, "launch": 600_000})
    for record in (killed, run_time(3, per_slot_hour=4.0)):
        store.storage.write(layout.ledger_key("gpt-7", record.number), encode_json(record))
    store.commit(new_manifest(11, trial="gpt-11"))
    return store


def show(store: CheckpointStore, *arguments: str) -> int:
    return main(["runs", "show", *arguments, "--storage", store.url])


def test_the_time_of_all_runs(store: CheckpointStore, capsys: pytest.CaptureFixture[str]) -> None:
    """The sum by bucket with shares, a row for each run, and up to when a killed one counts."""
    assert show(store, "gpt-7") == 0
    text = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "gpt-7: goodput 86.1 % of 3 h 00 min slot time in 2 runs, cost 7.00"
    assert {"queue 15 min 00 s 8.3 %", "launch 10 min 00 s 5.6 %", "train 2 h 35 min 86.1 %"} <= (
        set(lines)
    )
    first, second = [line for line in lines if "ann@node-1" in line]
    assert first.startswith("1 ann@node-1")
    assert first.endswith("2 1 h 00 min 83.3 %")
    assert second.endswith("2 2 h 00 min 87.5 % 7.00")
    assert "run 1 has no recorded end" in text
    assert "counts until 2031-05-09 18:00:00 UTC" in text
    assert "the cost leaves out 1 run without a price" in text


def test_as_json(store: CheckpointStore, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole ledger; `train --json` prints the same of a run that has failed."""
    assert show(store, "gpt-7", "--json") == 0
    shown: Any = json.loads(capsys.readouterr().out)
    assert [run["number"] for run in shown["runs"]] == [1, 3]
    assert sum(shown["slot_seconds"].values()) == shown["total_slot_seconds"] == 10800
    outcome = JsonResult(is_printed=False)
    outcome.store, outcome.trial = store, "gpt-7"
    ledger = json.loads(outcome.line())["ledger"]
    # It has not saved.
    of_saved = {"results": {}, "hyperparameters": {}, "links": []}
    assert {**ledger, **of_saved, "unsent_records": {}} == {
        name: shown[name] for name in shown if name not in PRINTED_BY_ALL
    }


def test_a_trial_without_a_ledger(
    store: CheckpointStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is refused with the trials that there are; so is an id that no trial can have."""
    assert show(store, "gpt-9") == 2
    assert f"no run of trial gpt-9 has a ledger of time in {store.url}" in (
        error := capsys.readouterr().err
    )
    assert "trials with checkpoints there: gpt-11" in error
    assert show(store, "../x") != 0
    assert "'../x' cannot be a trial's id" in capsys.readouterr().err


def test_a_config_with_dotted_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another program may store one that has a field twice."""
    store = CheckpointStore(f"file://{tmp_path}/storage")
    config = {"searcher": {"metric": "loss"}, "searcher.metric": "other"}
    store.commit(new_manifest(progress=Progress(7, validated_at=7), config=config))
    assert main(["runs", "list", "--storage", store.url]) == 0
    assert "Traceback" not in capsys.readouterr().err


@pytest.fixture
def compared(tmp_path: Path) -> str:
    """The URL of a storage with two trials, the second of which has improved and then not."""
    store = CheckpointStore(f"file://{tmp_path}/storage")
    for trial, lr, losses in (("gpt-a", 0.1, [0.5]), ("gpt-b", 0.25, [0.3, 0.7])):
        ended = "completed" if trial == "gpt-a" else ""
        history = ReportHistory(ended=ended, links={"Prefect": f"http://prefect/{trial}"})
        for number, loss in enumerate(losses):
            batches = 7 * (number + 1)
            store.commit(
                new_manifest(
                    batches, trial=trial, progress=Progress(batches, validated_at=batches),
                    metrics={"validation": {"loss": loss, "worst": float("nan")}},
                    hyperparameters={"lr": lr, "width": 64, "of": {"optimizer": trial}},
                    config={"searcher": {"metric": "loss"}, "name": "gpt"},
                    created_at=f"2031-05-09T1{batches % 10}:00:00Z",
                )
            )  # fmt: skip
            history.add_point("validation", batches, {"loss": loss})
        store.storage.write(layout.run_file_key(trial, "report.json"), history.to_json())
    return store.url


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_trials_are_listed_with_their_best_metric(
    compared: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest last: how far it is, and how its last run has ended, if it has."""
    assert main(["runs", "list", "--storage", compared, "--json"]) == 0
    second, first = json.loads(capsys.readouterr().out)["trials"]
    assert (first["trial"], first["results"]["ended"]) == ("gpt-a", "completed")
    assert second == {
        "trial": "gpt-b", "experiment": "gpt", "saved_at": "2031-05-09T14:00:00Z", "metric": "loss",
        "results": {
            "batches": 14, "ended": None, "best_loss": 0.3, "best_at_batch": 7, "last_loss": 0.7,
            "last_worst": None,
        },
        "hyperparameters": {"lr": 0.25, "width": 64, "of.optimizer": "gpt-b"},
    }  # fmt: skip
    assert main(["runs", "list", "--storage", compared]) == 0
    head, _, *rows = printed(capsys)
    assert head == "trial last checkpoint metric batches ended best"
    assert [row.split()[0] for row in rows[:2]] == ["gpt-b", "gpt-a"]
    assert rows[0].endswith("loss 14 0.3")
    assert rows[1].endswith("loss 7 completed 0.5")
    assert rows[3] == "trial hyperparameters"
    assert rows[5:] == ["gpt-b lr=0.25, of.optimizer=gpt-b", "gpt-a lr=0.1, of.optimizer=gpt-a"]


def test_trials_are_compared_by_what_differs_and_their_results(
    compared: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fields with one value in all trials are left out; results are not. With a page."""
    page = tmp_path / "curves.html"
    words = ["runs", "compare", "gpt-a", "gpt-b", "--storage", compared]
    assert main([*words, "--html", str(page)]) == 0
    assert printed(capsys)[2:] == [
        "hyperparameters.lr 0.1 0.25",
        "hyperparameters.of.optimizer gpt-a gpt-b",
        "batches 7 14",
        "ended completed",
        "best loss 0.5 0.3",
        "best at batch 7 7",
        "last loss 0.5 0.7",
        "last worst nan nan",
    ]
    assert "2 trials of gpt" in page.read_text()
    assert main([*words, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["trials"] == ["gpt-a", "gpt-b"]
    assert shown["settings"]["hyperparameters.lr"] == [0.1, 0.25]
    assert shown["results"]["best_at_batch"] == [7, 7]
    assert "hyperparameters.width" not in shown["settings"]


def test_one_trial_is_shown_with_its_results(
    compared: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And its hyperparameters and its page, before the ledger of its runs."""
    assert main(["runs", "show", "gpt-b", "--storage", compared]) == 0
    assert "lr 0.25" in printed(capsys)  # a trial without a ledger, as an imported one
    CheckpointStore(compared).storage.write(layout.ledger_key("gpt-b", 1), encode_json(run_time(1)))
    assert main(["runs", "show", "gpt-b", "--storage", compared]) == 0
    lines = printed(capsys)
    assert lines[0] == "gpt-b"
    assert lines[2:].index("best loss 0.3") < lines[2:].index("lr 0.25")
    assert "width 64" in lines
    assert "ended not yet, or it was killed" in lines
    assert "Prefect http://prefect/gpt-b" in lines
    assert any(line.startswith("gpt-b: goodput") for line in lines)
    assert main(["runs", "show", "gpt-b", "--storage", compared, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["results"]["best_loss"] == 0.3
    assert shown["hyperparameters"] == {"lr": 0.25, "width": 64, "of.optimizer": "gpt-b"}
    assert shown["links"] == ["http://prefect/gpt-b"]


def test_trackers_that_lack_records_are_named(
    compared: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the command that sends them; others are not."""
    with closing(JournalWriter(tmp_path / JOURNAL)) as journal:
        for batches in (1, 2, 3):
            journal.append(Noted(at=1.0, batches=batches, text="seen"))
    order = SenderOrder(
        trial="gpt-b", experiment="gpt", run_dir="/r", trackers={"mlflow": {}, "wandb": {}},
        patience_seconds=1.0,
    )  # fmt: skip
    storage = CheckpointStore(compared).storage
    files = {
        JOURNAL: (tmp_path / JOURNAL).read_bytes(), ORDER: encode_json(order),
        "mlflow.json": encode_json(State(sent=1)), "wandb.json": encode_json(State(sent=3)),
    }  # fmt: skip
    for name, data in files.items():
        storage.write(layout.run_file_key("gpt-b", f"{FOLDER}/{name}"), data)
    assert main(["runs", "show", "gpt-b", "--storage", compared]) == 0
    first, *others = printed(capsys)
    sends = f"trialflow runs sync gpt-b --storage {compared}"
    assert first.startswith(f"tracker mlflow has not got 2 records: {sends}, unless")
    assert not any("wandb" in line for line in others)
    assert main(["runs", "show", "gpt-b", "--storage", compared, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unsent_records"] == {"mlflow": 2}


def test_a_table_shows_the_beginning_of_a_long_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of the error with which a run has failed; a program gets all of it."""
    reason = "failed: " + "the loss is not finite " * 9
    assert runs._cell(reason) == reason.strip()
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    shown = runs._cell(reason)
    assert len(shown) == runs.CELL_CHARACTERS
    assert shown.startswith("failed: the loss is not finite")
    assert shown.endswith("…")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["gpt-c"], "no checkpoint of trial gpt-c in"),
        (["gpt-a", "--html", "/nowhere/a.html"], "--html /nowhere/a.html: No such file"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    words: list[str], error: str, compared: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the trials that there are."""
    assert main(["runs", "compare", *words, "--storage", compared]) == 2
    assert error in capsys.readouterr().err


def test_a_damaged_trial_hides_no_other(compared: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A warning names its manifest."""
    CheckpointStore(compared).storage.write(layout.manifest_key("gpt-c", 7, "cccc"), b"{")
    assert main(["runs", "list", "--storage", compared]) == 0
    shown = capsys.readouterr()
    assert ("gpt-a" in shown.out, "gpt-c" in shown.out) == (True, False)
    assert "manifests/gpt-c/0000000007-cccc.json" in shown.err


@pytest.mark.parametrize(
    "words",
    [
        "runs show ID",
        "runs sync ID",
        "runs compare ID",
        "checkpoints list --trial ID",
        "checkpoints verify --trial ID",
        "checkpoints show best:ID",
        "export --trial ID --to /nowhere/x.pt",
        "logs ID",
    ],
)
def test_the_first_characters_name_a_trial(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That has saved; if they are those of several trials, it names these."""
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path / "runs"))
    store = CheckpointStore(f"file://{tmp_path}/storage")
    for trial in ("gpt-4f0c21aa", "gpt-4f77d013"):
        validated = Progress(7, validated_at=7)
        store.commit(
            new_manifest(
                7, trial=trial, experiment="gpt", progress=validated, config=BY_LOSS,
                metrics={"validation": {"loss": 0.5}},
            )
        )  # fmt: skip
        store.storage.write(layout.ledger_key(trial, 1), encode_json(run_time(1)))
        store.storage.write(layout.run_file_key(trial, "logs/2031-a/rank-0.log"), trial.encode())

    def call(named: str) -> tuple[int, str]:
        code = main([*words.replace("ID", named).split(), "--storage", store.url])
        seen = capsys.readouterr()
        return code, seen.out + seen.err

    assert call("gpt-4f0c") == call("gpt-4f0c21aa") != call("gpt-9")
    code, error = call("gpt-4f")
    assert code == 2
    assert "not one trial" in error
    assert "gpt-4f0c21aa, gpt-4f77d013" in error


BY_LOSS = {"searcher": {"metric": "loss", "smaller_is_better": True}}
