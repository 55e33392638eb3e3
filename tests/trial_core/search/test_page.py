"""The page of a search: made of its log alone, small, and text that a stranger may have written."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import chromium
from tests.support.searches import RANGES, metric_of, search_experiment, searched
from tests.trial_core.observe.report.test_html_report import EVIL, Page
from trial_core.checkpoint.storage.base import Storage
from trial_core.checkpoint.storage.open_storage import open_storage
from trial_core.common.text_format import number
from trial_core.errors import SearchError
from trial_core.search.figures import figures, html
from trial_core.search.log import SearchLog, searches
from trial_core.search.page import importance, markdown, tables
from trial_core.search.search import Search
from trial_core.search.simulate import simulate
from trial_core.search.view import SearchView, stored_view, view_of

SEARCH = "toy-00000000beef"


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(f"memory://{tmp_path}")


def table(view: SearchView, title: str) -> list[dict[str, str]]:
    """The rows of a table, by column."""
    (found,) = [each for each in tables(view) if each.title.startswith(title)]
    return [dict(zip(found.columns, row, strict=True)) for row in found.rows]


def names(view: SearchView) -> list[str]:
    return [name.short for name in view.names]


def test_a_stored_search_is_seen_as_its_driver_sees_it(storage: Storage) -> None:
    """Also after it was continued with more trials: nothing but the log is read."""
    searched(storage, results=7)
    search = searched(storage, experiment=search_experiment(max_trials=40), results=30)
    stored, driven = stored_view(storage, SEARCH), view_of(search, storage.url)
    assert stored.summary() == driven.summary()
    assert stored.state.trials == search.state.trials
    assert stored.state.work == search.state.work
    assert markdown(stored) == markdown(driven)
    assert html(stored).split("<body>")[1].split("<script")[0] in html(driven)
    assert stored.max_trials == 40


def test_no_class_that_a_log_names_is_imported(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A stored sampler is the name of a module."""
    (tmp_path / "own_sampler.py").write_text(
        "import os\nos.environ['SAMPLED'] = os.environ.get('SAMPLED', '') + 'x'\n"
        "class Own:\n  def ask(self): return {'depth': 3}\n  def tell(self, **_): pass\n"
    )
    monkeypatch.setenv("SAMPLED", "")
    monkeypatch.syspath_prepend(tmp_path)
    searched(
        storage, experiment=search_experiment(name="custom", sampler="own_sampler:Own"), results=3
    )
    assert os.environ["SAMPLED"] == "x"
    del sys.modules["own_sampler"]
    rows = table(stored_view(storage, SEARCH), "Trials")
    assert os.environ["SAMPLED"] == "x"
    assert rows[0]["depth"] == "3"
    assert rows[0]["lr"] == ""  # the sampler has left it out


def test_the_page_says_what_is_best_and_where(storage: Storage) -> None:
    """Its trial, its metric, what was searched for, and its checkpoint."""
    view = view_of(searched(storage), storage.url)
    assert view.state.best is not None
    trial, result = view.state.best
    assert (trial, result) == view.ranked[0][:2]
    text = markdown(view)
    assert f"loss {number(result.metric)} at 64 batches, trial {trial.number}" in text
    assert f"(`{trial.id}`), checkpoint `uuid-{trial.number}-64` in `{storage.url}/check" in text
    assert f"lr {trial.hyperparameters['optimizer']['lr']:.6g} · depth" in text
    assert "seed" not in text  # it has no range
    assert "16 of 16 trials begun: 16 ended" in text
    assert "**over**" in text
    assert "**suspended**" in markdown(view, "suspended")


def test_the_larger_metric_may_be_better(storage: Storage) -> None:
    """Everywhere: in the order of trials, at rungs, and in the figures."""
    larger = search_experiment(smaller_is_better=False, name="random")
    view = view_of(searched(storage, experiment=larger))
    values = [value for *_, value in view.ranked]
    assert values == sorted(values, reverse=True)
    assert values[0] == max(metric_of(t.hyperparameters, 64) for t in view.state.trials)
    assert table(view, "Rungs")[0]["best loss"].startswith(number(values[0]))
    assert [y for _, y in view.best_so_far] == sorted(y for _, y in view.best_so_far)
    assert view.best_so_far[-1] == (16 * 64, values[0])


def test_all_trials_of_a_longer_random_search_continue(storage: Storage) -> None:
    """It has a second rung, which each of its trials reaches; the page promises no choice."""
    searched(storage, experiment=search_experiment(name="random"))
    longer = search_experiment(name="random", max_length={"batches": 128})
    view = view_of(searched(storage, experiment=longer), storage.url)
    assert [row["trained to"] for row in table(view, "Rungs")] == ["64 batches", "128 batches"]
    assert {trial.reached[-1].length for trial in view.state.trials} == {128}
    assert "random: 16 trials of at most 128 batches; the smaller loss is better" in markdown(view)


def test_rungs_by_bracket(storage: Storage) -> None:
    """How many trials have reached each, and how many of them continue."""
    adaptive = search_experiment(name="adaptive_asha", max_trials=24)
    view = view_of(searched(storage, experiment=adaptive))
    rows = table(view, "Rungs")
    assert [(row["bracket"], row["trained to"]) for row in rows] == [
        (str(bracket + 1), f"{length} batches")
        for bracket, plan in enumerate(view.state.plans)
        for length in plan.rungs
    ]
    assert len(view.state.plans) == 2
    reached = [
        sum(len(t.reached) > rung for t in view.state.trials if t.bracket == bracket)
        for bracket, plan in enumerate(view.state.plans)
        for rung in range(len(plan.rungs))
    ]
    assert [int(row["trials"]) for row in rows] == reached
    assert [row["promoted"] for row in rows] == [*map(str, reached[1:3]), "", str(reached[4]), ""]
    assert table(view, "Trials")[0]["at 64"] == f"{number(view.ranked[0][2])}"


def test_who_was_promoted_and_why(storage: Storage) -> None:
    """The newest first; a trial that is promoted and not trained yet is in it too."""
    view = view_of(searched(storage))
    first = table(view, "Promoted")[-1]
    number = int(first["trial"])
    assert first["trained to"] == "16 batches"
    assert first["because it was"] == "1st of 4 at 4 batches"
    assert len(view.state.trials[number].reached) > 1
    assert len(table(view, "Promoted")) == sum(len(t.reached) - 1 for t in view.state.trials)
    part = view_of(searched(storage, "toy-part", results=4))
    (row,) = table(part, "Promoted")
    trial = part.state.trials[int(row["trial"])]
    assert (trial.status, len(trial.reached)) == ("due", 1)
    shown = {row["trial"]: row["status"] for row in table(part, "Trials")}
    assert shown[row["trial"]] == "to 16 batches (promoted: 1st of 4 at 4 batches)"


def test_failures_say_why(storage: Storage) -> None:
    """In a table, newest first, and in the table of trials, which has those without a result."""
    search = searched(storage, failures={2: "out of memory\nat rank 3", 5: "\x1b[31mred"})
    view = view_of(search)
    rows = table(view, "Failures")
    assert [(row["trial"], row["why"]) for row in rows] == [("5", "red"), ("2", "out of memory")]
    assert rows[0]["id"] == view.state.trials[5].id
    status = {row["trial"]: row["status"] for row in table(view, "Trials")}
    assert status["2"] == "failed: out of memory"
    assert len(status) == 16


def test_a_search_without_a_result_has_a_page(storage: Storage) -> None:
    """Nothing has been trained, or the metric was never a finite number."""
    search = Search(search_experiment(), SearchLog(storage, SEARCH), SEARCH)
    assert "best" not in markdown(view_of(search)).replace("best loss", "")
    leg = search.next(())
    assert leg is not None
    search.reached(leg, 4, {"loss": math.nan}, None)
    view = view_of(search)
    assert Page(html(view)).figures == []
    assert table(view, "Trials")[0]["at 4"] == "not finite"
    assert view.summary()["best"] is None


def test_short_names_are_unique(storage: Storage) -> None:
    """The end of the path that no other hyperparameter has; lists have no names."""
    one: dict[str, Any] = {"type": "double", "minval": 0, "maxval": 1}
    ranges = {"a": {"lr": one}, "b": {"lr": one, "x": [one, {"y": one}]}, "lone": one, "lr": one}
    view = view_of(searched(storage, experiment=search_experiment(ranges)))
    assert names(view) == ["a.lr", "b.lr", "x.0", "y", "lone", "lr"]
    trial = view.state.trials[0]
    assert view.names[3].of(trial) == trial.hyperparameters["b"]["x"][1]["y"]


def test_a_thousand_trials_stay_small(storage: Storage) -> None:
    """In Markdown the best 50 and some others, and how many are left out; in HTML every trial."""
    many = search_experiment(max_trials=1000, max_concurrent_trials=0, max_failed_trials=1000)
    curves = [[(4, 1 - i / 1000), (16, 0.5 - i / 2000)] for i in range(1000)]
    search = simulate(many, curves)
    view = view_of(search)
    text = markdown(view)
    assert len(text) < 20_000
    assert len(table(view, "Trials")) == 50
    assert "not shown: 950 more trials" in text
    assert f"not shown: {len(view.state.promotions) - 50} more\n" in text
    page = Page(html(view))
    drawn = [line for line in page.figures[1]["data"] if "hovertext" in line]
    assert sum(line["x"].count(None) for line in drawn) == 1000
    assert len(json.dumps(page.figures)) < 700_000


def test_all_that_are_due_or_failed_are_listed(storage: Storage) -> None:
    """Although they are not among the best; of more than 200, the newest."""
    many = search_experiment(
        max_trials=400, max_concurrent_trials=300, max_failed_trials=400, name="random"
    )
    failures = dict.fromkeys(range(60, 100), "bad")
    search = searched(storage, experiment=many, failures=failures, results=120)
    running: set[int] = set()

    def begin(count: int) -> SearchView:
        """The search with so many trials that are being trained."""
        while len(running) < count:
            leg = search.next(running)
            assert leg is not None
            running.add(leg.trial.number)
        return view_of(search)

    statuses = [row["status"][:6] for row in table(begin(30), "Trials")]
    assert statuses == ["ended:"] * 50 + ["failed"] * 40 + ["to 64 "] * 30
    rows = table(begin(170), "Trials")
    assert [int(row["trial"]) for row in rows[50:]] == [*range(70, 100), *range(120, 290)]
    assert "not shown: 40 more trials" in markdown(view_of(search))


def test_figures_have_each_trial_and_result(storage: Storage) -> None:
    """The best so far, the curves by rank, and a line over the axes for each trial."""
    view = view_of(searched(storage, failures={3: "bad"}))
    best, curves, parallel = figures(view).values()
    assert best["data"][0]["x"][-1] == view.batches
    assert best["data"][0]["y"][-1] == view.ranked[0][2]
    assert curves["layout"]["xaxis"] == {
        "type": "log", "title": {"text": "batches"}, "tickvals": [4, 16, 64]
    }  # fmt: skip
    by_name = {line["name"]: line for line in curves["data"]}
    trial, result, value = view.ranked[0]
    top = by_name["best 10 %"]
    assert top["x"][: len(trial.reached)] == tuple(each.length for each in trial.reached)
    assert top["y"][len(trial.reached) - 1] == value
    assert top["hovertext"][0] == f"trial {trial.number}: {number(trial.reached[0].metric)}"
    points = sum(len(line["x"]) for line in by_name.values())
    results = sum(len(each.reached) for each in view.state.trials)
    assert points == results + 15  # a gap after each trial
    assert parallel["layout"]["xaxis"]["ticktext"] == ["lr", "depth", "kind", "loss"]
    line = parallel["data"][2]
    lows = [math.log10(t.hyperparameters["optimizer"]["lr"]) for t, *_ in view.ranked]
    height = (lows[0] - min(lows)) / (max(lows) - min(lows))
    assert line["y"][0] == pytest.approx(height, abs=1e-4)
    kinds = parallel["data"][5]
    there = sorted({t.hyperparameters["kind"] for t, *_ in view.ranked})
    assert kinds["text"] == there
    assert kinds["y"] == [i / (len(there) - 1) for i in range(len(there))]
    assert result.length == 64


def test_importance_finds_what_matters(storage: Storage) -> None:
    """Also if the best value is in the middle of the range, where a correlation is 0."""
    noise = {
        "type": "categorical",
        "vals": [f"v{i}" for i in range(30)],
    }  # a third, less what chance gives
    experiment = search_experiment({**RANGES, "noise": noise}, max_trials=100, name="random")
    view = view_of(searched(storage, experiment=experiment))
    found = importance(view)
    assert found is not None
    length, shares = found
    assert length == 64
    assert shares[0][0].short == "lr"
    assert shares[0][1] > 0.5
    assert max(share for _, share in shares[1:]) < 0.2
    assert table(view, "Importance")[0]["hyperparameter"] == "lr"


def test_importance_needs_twenty_results_of_one_length(storage: Storage) -> None:
    assert importance(view_of(searched(storage, results=16))) is None
    more = search_experiment(max_trials=20, name="random")
    assert importance(view_of(searched(storage, "toy-20", more, results=19))) is None
    assert importance(view_of(searched(storage, "toy-20", more))) is not None


def hostile(storage: Storage) -> SearchView:
    """A search of which every text that others may choose has markup."""
    ranges = {
        EVIL: {"type": "categorical", "vals": [EVIL, "|*_x_*|", "$x$", {EVIL: EVIL}]},
        "%{x}\x1b[2J": {"type": "log", "minval": -4, "maxval": -1},
        "a" * 500: {"type": "int", "minval": 1, "maxval": 3},
    }
    experiment = search_experiment(ranges, experiment=EVIL, metric=EVIL)
    return view_of(searched(storage, experiment=experiment, failures={1: EVIL}), EVIL)


def test_a_stranger_writes_no_markup(storage: Storage) -> None:
    """Names and values of hyperparameters, of the metric, of the experiment, and messages."""
    clean = Page(html(view_of(searched(storage, "toy-clean"))))
    view = hostile(storage)
    page = Page(html(view))
    assert "onerror" in page.text
    for tag in ("script", "img", "h2", "table"):
        assert abs(
            [t for t, _ in page.tags].count(tag) - [t for t, _ in clean.tags].count(tag)
        ) <= (
            tag in ("h2", "table")  # of the failure
        )
    assert "<" not in json.dumps([_texts(figure) for figure in page.figures])
    assert "\x1b" not in markdown(view)
    assert len(markdown(view)) < 40_000


def _texts(value: Any) -> list[str]:
    """All texts of a figure but its templates."""
    if isinstance(value, dict):
        return [text for inner in value.values() for text in _texts(inner)]
    if isinstance(value, list):
        return [text for inner in value for text in _texts(inner)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize("text", ["_x_", "*x*", "`x", "a|b", "&lt;", "[x](y)", "\\|"])
def test_markdown_in_a_name_stays_text(storage: Storage, text: str) -> None:
    """A row has its cells, whatever a hyperparameter is called."""
    ranges = {text: {"type": "categorical", "vals": [text, text + "2"]}}
    view = view_of(searched(storage, experiment=search_experiment(ranges)))
    page = Page(html(view))
    assert f"\n{text}\n" in page.text
    cells = [tag for tag, _ in page.tags if tag == "th"]
    assert len(cells) == sum(len(each.columns) for each in tables(view))


def test_an_altered_log_is_an_error(storage: Storage) -> None:
    """Settings that are none, or a trial that was never due; a search that is not there."""
    searched(storage)
    key = f"searches/{SEARCH}/000001.json"
    first = json.loads(storage.read(key) or b"")
    for change in ({"max_trials": -1}, {"name": "no"}, {"max_length": 3.5}, {"divisor": "x"}):
        altered = {**first, "searcher": {**first["searcher"], **change}}
        storage.write(key, json.dumps(altered).encode())
        with pytest.raises(SearchError, match=f"settings of search {SEARCH}.*cannot be read"):
            stored_view(storage, SEARCH)
    with pytest.raises(SearchError, match=f"no search 'x/../y'.*searches there: {SEARCH}"):
        stored_view(storage, "x/../y")


def test_searches_of_a_storage(storage: Storage, caplog: pytest.LogCaptureFixture) -> None:
    """Those with records, sorted; other objects are ignored with a warning."""
    assert searches(storage) == []
    for name in ("toy-b", "toy-a"):
        searched(storage, name, results=1)
    for key in ("searches/notes.txt", "searches/.hidden/000001.json", "searches/toy-c/readme"):
        storage.write(key, b"x")
    assert searches(storage) == ["toy-a", "toy-b"]
    assert [record.getMessage().split(" is ignored")[0] for record in caplog.records] == [
        f"{storage.url}/searches/.hidden/000001.json", f"{storage.url}/searches/notes.txt"
    ]  # fmt: skip


@pytest.mark.browser
@pytest.mark.long
def test_a_browser_draws_the_page(storage: Storage, tmp_path: Path) -> None:
    """Every figure, without a request, a message in the console or a stranger's script."""
    path = tmp_path / "search.html"
    path.write_text(html(hostile(storage)), encoding="utf-8")
    with chromium() as browser:
        browser.open(path.as_uri(), SEARCH)
        run = browser._driver.execute_script
        count = "return document.querySelectorAll('{}').length"
        browser.wait_for(lambda: bool(run(count.format(".main-svg")) >= 6), "three figures")
        # The best so far; three groups by rank, twice; and an axis of each of three and the metric.
        browser.wait_for(lambda: bool(run(count.format(".scatter")) == 1 + 3 + 3 + 4), "the lines")
        shown = run("return [...document.querySelectorAll('.figure text')].map(t => t.textContent)")
        assert any(text.startswith("</script><script>") for text in shown)
        assert "$x$" in shown
        assert run("return performance.getEntriesByType('resource').length") == 0
        assert run("return window.injected") is None
        assert browser._driver.get_log("browser") == []
