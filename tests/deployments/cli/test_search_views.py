"""`trialflow search list` and `show` on stored searches."""

from __future__ import annotations

import csv
import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.searches import search_experiment, searched
from tests.trial_core.observe.report.test_html_report import EVIL, Page
from trial_core.checkpoint.storage.base import Storage
from trial_core.checkpoint.storage.open_storage import open_storage
from trial_core.search.search import Search
from trial_core.search.simulate import read_curves, simulate
from trialflow.deployments.cli.main import main

SEARCH = "toy-00000000beef"


pytestmark = pytest.mark.xdist_group("searches")  # `stored` is made once


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(f"file://{tmp_path}/storage")


@pytest.fixture
def run(
    storage: Storage, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs a command of `trialflow search`: its exit code, and what it prints and warns."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["search", *arguments, "--storage", storage.url])
        return code, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Search]:
    """A search that is over, and its folder: asha, of 16 trials, of which one has failed."""
    folder = tmp_path_factory.mktemp("searched")
    return folder, searched(open_storage(f"file://{folder}"), failures={3: "out of memory"})


@pytest.fixture
def search(stored: tuple[Path, Search], tmp_path: Path) -> Search:
    """That search, in a storage that the test may change."""
    folder, search = stored
    shutil.copytree(folder, tmp_path / "storage")
    return search


Run = Callable[..., tuple[int, str, str]]


def words(text: str) -> list[str]:
    """Each line with its words separated by one space."""
    return [" ".join(line.split()) for line in text.splitlines()]


def test_the_list(storage: Storage, search: Search, run: Run) -> None:
    """The last one to record is last; one that was altered does not hide the others."""
    part = searched(storage, "toy-0a", search_experiment(max_trials=40), results=10)
    storage.write("searches/toy-0b/000001.json", b"{}")
    code, text, warned = run("list")
    best = search.state.best
    assert best is not None
    metric = best[1].metric
    assert code == 0
    rows = words(text)[2:]
    assert rows[0].startswith("toy-0b unreadable")
    assert rows[1].startswith(f"{SEARCH} toy asha 16 of 16 loss {metric:.4g}"[:40])
    assert f" over {search.events[-1].at[:4]}" in rows[1]
    assert rows[2].startswith(f"toy-0a toy asha {len(part.state.trials)} of 40 loss")
    assert f" {part.state.progress:.0%} " in rows[2]
    assert "toy-0b" in warned
    _, text, _ = run("list", "--json")
    altered, whole, _ = json.loads(text)["searches"]
    assert altered["search"] == "toy-0b"
    assert {name: whole[name] for name in ("search", "searcher", "best", "is_over", "failed")} == {
        "search": SEARCH, "searcher": "asha", "best": metric, "is_over": True, "failed": 1
    }  # fmt: skip
    assert whole["best_trial"] == best[0].id
    assert not any(" " in name for name in whole)


class Three:
    """Has hyperparameters for three trials."""

    def __init__(self) -> None:
        self.depths = [1, 2, 3]

    def ask(self) -> dict[str, Any] | None:
        return {"depth": self.depths.pop()} if self.depths else None

    def tell(self, **_: Any) -> None:
        pass


def test_a_search_that_its_sampler_has_ended(storage: Storage, run: Run) -> None:
    """It is over with the trials that it has, and the tables say why there are no more."""
    of = search_experiment(name="custom", sampler=f"{__name__}:Three", num_rungs=1)
    searched(storage, SEARCH, of)
    (row,) = words(run("list")[1])[2:]
    assert row.startswith(f"{SEARCH} toy custom 3 of 16 loss")
    assert " over " in row
    (shown,) = json.loads(run("list", "--json")[1])["searches"]
    assert (shown["is_over"], shown["progress"], shown["trials"]) == (True, 1.0, 3)
    said = words(run("show", SEARCH)[1])[0]
    assert said.startswith(f"{SEARCH}: 3 of 16 trials begun, the sampler has no more: 3 ended")


def test_a_storage_without_searches(storage: Storage, run: Run) -> None:
    assert run("list") == (0, f"no searches in {storage.url}\n", "")
    assert json.loads(run("list", "--json")[1])["searches"] == []


def test_a_search_as_tables(search: Search, run: Run) -> None:
    """The best, rungs, trials, promotions and failures."""
    code, text, _ = run("show", SEARCH)
    lines = words(text)
    assert code == 0
    assert lines[0].startswith(f"{SEARCH}: 16 of 16 trials begun: 15 ended, 1 failed")
    trial, result = search.state.best or (None, None)
    assert trial is not None
    assert result is not None
    assert f"{trial.id}, checkpoint {result.checkpoint}" in lines[2]
    assert [line for line in lines if line in ("Rungs", "Trials", "Promoted", "Failures")] == [
        "Rungs", "Trials", "Promoted", "Failures"
    ]  # fmt: skip
    assert any(line.startswith("1 4 batches 15 ") for line in lines)
    assert f"3 {search.state.trials[3].id} failed out of memory" in lines


def test_a_name_may_be_its_beginning(storage: Storage, search: Search, run: Run) -> None:
    """Of one search alone."""
    assert run("show", "toy-0", "--json")[1] == run("show", SEARCH, "--json")[1]
    searched(storage, "toy-00000000feed", results=1)
    code, _, error = run("show", "toy-0")
    assert code == 2
    assert "toy-0 is not one search, but 2: toy-00000000beef, toy-00000000feed" in error
    code, _, error = run("show", "../x")
    assert code != 0
    assert f"no search '../x' in {storage.url}; searches there: {SEARCH}" in error
    assert "the id of the search is empty" in run("show", "")[2]


def test_a_search_as_json(search: Search, run: Run) -> None:
    """All trials with their results, promotions, and the brackets' rungs."""
    shown = json.loads(run("show", SEARCH, "--json")[1])
    assert [trial["id"] for trial in shown["trials"]] == [t.id for t in search.state.trials]
    assert shown["trials"][3]["status"] == "failed"
    assert shown["trials"][0]["hyperparameters"] == search.state.trials[0].hyperparameters
    results = [[each["metric"] for each in trial["reached"]] for trial in shown["trials"]]
    assert results == [[each.metric for each in t.reached] for t in search.state.trials]
    assert shown["brackets"][0]["rungs"] == [4, 16, 64]
    assert [each["trial"] for each in shown["promotions"]] == [
        each.trial for each in search.state.promotions
    ]
    assert not any(" " in name for name in shown)


def test_a_search_as_csv(search: Search, run: Run, tmp_path: Path) -> None:
    """A row a result, with which the same search can be simulated."""
    (tmp_path / "curves.csv").write_text(text := run("show", SEARCH, "--csv")[1])
    rows = list(csv.DictReader(io.StringIO(text)))
    results = [(trial, each) for trial in search.state.trials for each in trial.reached]
    assert [(int(row["trial"]), float(row["metric"])) for row in rows] == [
        (trial.number, each.metric) for trial, each in results
    ]
    first = search.state.trials[0]
    assert float(rows[0]["optimizer.lr"]) == first.hyperparameters["optimizer"]["lr"]
    assert rows[0]["checkpoint"] == "uuid-0-4"
    curves = read_curves(tmp_path / "curves.csv")
    assert [bool(curve) for curve in curves] == [bool(each.reached) for each in search.state.trials]
    again = simulate(search_experiment(), curves).state.best
    assert again is not None
    assert again[1].metric == min(each.metric or 1 for _, each in results)


def test_a_search_as_a_page(search: Search, run: Run, tmp_path: Path) -> None:
    """In the file that is named; not with another form, and not where nothing can be written."""
    path = tmp_path / "page.html"
    assert run("show", SEARCH, "--html", str(path))[:2] == (0, f"{path}\n")
    page = Page(path.read_text(encoding="utf-8"))
    assert len(page.figures) == 3
    assert "out of memory" in page.text
    code, _, error = run("show", SEARCH, "--html", str(tmp_path / "no/page.html"))
    assert (code, "No such file or directory" in error) == (2, True)
    code, _, error = run("show", SEARCH, "--json", "--csv")
    assert (code, "give one of --json, --csv, --html and --optuna" in error) == (2, True)


def test_a_search_as_an_optuna_study(search: Search, run: Run, tmp_path: Path) -> None:
    """In the database that is named, by the search's id; what the database says is an error."""
    import optuna  # takes a second

    url = f"sqlite:///{tmp_path}/study.db"
    code, text, _ = run("show", "toy", "--optuna", url)
    assert (code, text) == (0, f"stored as the Optuna study {SEARCH}\n")
    study = optuna.load_study(study_name=SEARCH, storage=url)
    assert [each.user_attrs["trial"] for each in study.trials] == [
        t.id for t in search.state.trials
    ]
    assert [list(each.intermediate_values.values()) for each in study.trials] == [
        [each.metric for each in trial.reached] for trial in search.state.trials
    ]
    code, _, error = run("show", SEARCH, "--optuna", url)
    assert (code, f"there is an Optuna study '{SEARCH}'" in error) == (2, True)
    code, _, error = run("show", SEARCH, "--optuna", "study.db")
    assert (code, "no Optuna study can be stored" in error) == (2, True)
    code, _, error = run("show", SEARCH, "--optuna", url, "--csv")
    assert (code, "give one of --json, --csv, --html and --optuna" in error) == (2, True)


def test_optuna_may_not_be_installed(
    search: Search, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says how to install it."""
    monkeypatch.delitem(sys.modules, "trial_core.search.optuna_sampler", raising=False)
    monkeypatch.setitem(sys.modules, "optuna", None)
    code, _, error = run("show", SEARCH, "--optuna", "sqlite:///study.db")
    assert (code, "pip install 'trialflow[search]'" in error) == (2, True)


def test_a_strangers_text_moves_no_cursor(storage: Storage, run: Run) -> None:
    """Whatever a log says: names, values, messages, in each form."""
    escape = "\x1b[2J\x1b]0;title\x07"
    ranges: dict[str, Any] = {
        f"{escape}{EVIL}": {"type": "categorical", "vals": [f"{escape}{EVIL}", [escape]]}
    }
    experiment = search_experiment(ranges, f"{escape}{EVIL}", metric=f"{escape}\nloss")
    searched(storage, SEARCH, experiment, failures={1: f"{escape}bad"})
    for key in storage.sizes("searches"):  # and as nobody's driver writes it
        record = json.loads(storage.read(key) or b"")
        free = {"id", "at", "by", "checkpoint"} & record.keys()
        changed = {name: f"{escape}{EVIL}{record[name]}" for name in free if record[name]}
        storage.write(key, json.dumps({**record, **changed}).encode())
    for arguments in (("list",), ("show", SEARCH), ("show", SEARCH, "--json"),
                      ("show", SEARCH, "--csv"), ("list", "--json")):  # fmt: skip
        code, text, warned = run(*arguments)
        assert code == 0
        assert not {"\x1b", "\x07"} & {*text, *warned}
        assert "injected" in text
