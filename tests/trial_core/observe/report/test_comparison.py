"""The page that compares stored trials."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import chromium
from tests.support.manifests import new_manifest
from tests.trial_core.observe.report.test_html_report import EVIL, Page
from trial_core.checkpoint import layout
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.code_folder import pack_code
from trial_core.checkpoint.transfer.trial_code import upload_code
from trial_core.observe.report.comparison import comparison_page
from trial_core.observe.report.history import ReportHistory
from trial_core.observe.report.stored_trial import read_trial
from trial_core.schedule.sequencer import Progress


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(f"file://{tmp_path}/storage")


def add(
    store: CheckpointStore, number: int, folder: Path, code: str = "x = 1\n", **values: Any
) -> str:
    """A trial whose loss is its number after 7 batches, and a half of it after 14.

    The first one lacks the other metric.
    """
    trial, uuid = f"gpt-{number}", f"{number:08d}-0000-0000-0000-000000000000"
    (made := folder / str(number)).mkdir()
    (made / "model.py").write_text(code)
    manifest = new_manifest(
        14, uuid=uuid, trial=trial, progress=Progress(14, validated_at=14),
        metrics={"validation": {"loss": number / 2}}, config={"searcher": {"metric": "loss"}},
        hyperparameters={"lr": 10.0**-number, "width": 64, **values},
        code=upload_code(store, uuid, pack_code(made).data or b""),
    )  # fmt: skip
    store.commit(manifest)
    history = ReportHistory()
    for batches in (7, 14):
        evil = {EVIL: 1.0} if number > 1 else {}
        history.add_point("validation", batches, {"loss": 7 * number / batches, **evil})
    store.storage.write(layout.run_file_key(trial, "report.json"), history.to_json())
    return trial


def compared(store: CheckpointStore, *trials: str) -> Page:
    return Page(comparison_page([read_trial(store, each) for each in trials], store))


def lines(figure: Mapping[str, Any]) -> dict[str, tuple[list[int], list[float]]]:
    return {each["name"]: (each["x"], each["y"]) for each in figure["data"]}


def test_curves_share_an_axis_and_differences_are_shown(
    store: CheckpointStore, tmp_path: Path
) -> None:
    """A line for each trial; hyperparameters that differ with the results; lines of code."""
    second = add(store, 2, tmp_path, "x = 1\ny = 2\n")
    page = compared(store, add(store, 1, tmp_path), second, add(store, 3, tmp_path, "y = 2\n"))
    loss, evil = page.figures
    assert lines(loss) == {
        "gpt-1": ([7, 14], [1.0, 0.5]), "gpt-2": ([7, 14], [2.0, 1.0]),
        "gpt-3": ([7, 14], [3.0, 1.5]),
    }  # fmt: skip
    colours = [each["line"]["color"] for each in loss["data"]]
    assert len(set(colours)) == 3
    assert [each["line"]["color"] for each in evil["data"]] == colours[1:]
    text = page.text
    assert "the same in all: width 64\n" in text
    assert " ".join(text.split()).count("gpt-2 0.01 14 1 14 1") == 1
    first = text.index("gpt-1 and gpt-2")
    assert "\n+y = 2\n" in text[first:]
    assert "-x = 1" not in text[first : text.index("gpt-1 and gpt-3")]
    assert "-x = 1\n" in text[text.index("gpt-1 and gpt-3") :]


def test_figures_of_the_machine_are_named_as_in_reports(
    store: CheckpointStore, tmp_path: Path
) -> None:
    trials = [add(store, number, tmp_path) for number in (1, 2)]
    history = ReportHistory()
    for batches in (7, 14):
        history.add_point("machine", batches, {"system/gpu0_memory_percent": 50.0})
    store.storage.write(layout.run_file_key(trials[0], "report.json"), history.to_json())
    assert "machine of the driver: gpu0 memory (%)" in compared(store, *trials).text


def test_ten_trials_have_parallel_coordinates(store: CheckpointStore, tmp_path: Path) -> None:
    """The best tenth of them in a colour of its own; nine are told apart by their colours."""
    trials = [add(store, number, tmp_path) for number in range(10, 0, -1)]
    assert len(compared(store, *trials[:9]).figures) == 2
    page = compared(store, *trials)
    parallel, loss, _ = page.figures
    assert lines(loss)["best 10 %"] == ([7, 14, None], [1.0, 0.5, None])
    (best,) = [each for each in parallel["data"] if each.get("name") == "best 10 %"]
    assert best["hovertext"][:2] == ["gpt-1: lr 0.1", "gpt-1: loss 0.5"]
    assert page.text.index("gpt-1\n") < page.text.index("gpt-10\n")


def test_code_that_cannot_be_read_is_named(store: CheckpointStore, tmp_path: Path) -> None:
    """The rest of the page is there."""
    trials = add(store, 1, tmp_path), add(store, 2, tmp_path, "x = 2\n")
    store.storage.remove(layout.file_key(f"{2:08d}-0000-0000-0000-000000000000", layout.CODE_NAME))
    page = compared(store, *trials)
    assert len(page.figures) == 2
    assert layout.CODE_NAME in page.text


def test_long_differences_are_cut(store: CheckpointStore, tmp_path: Path) -> None:
    """To compare all lines of two large files may take an hour; a changed line in one is shown."""
    many = [f"x{number % 5}" if number % 2 else f"y = {number}" for number in range(9000)]
    trials = [
        add(store, 1, tmp_path, "\n".join(many)),
        add(store, 2, tmp_path, "\n".join([*many[:5000], "z" * 999, *many[5001:]])),
        add(store, 3, tmp_path, "\n".join(f"-{each}" for each in many)),
    ]
    text = compared(store, *trials).text
    assert f"\n+{'z' * 299}…\n" in text
    assert "@@ -4999,5 +4999,5 @@" in text
    assert "9000 lines, and 9000" in text


def test_a_stranger_writes_no_markup(store: CheckpointStore, tmp_path: Path) -> None:
    """Names of metrics and of hyperparameters, their values, and code are text."""
    trials = [add(store, n, tmp_path, f"{EVIL} {n}\n```\n", **{EVIL: f"{EVIL}{n}"}) for n in (1, 2)]
    page = compared(store, *trials)
    tags = [tag for tag, _ in page.tags]
    assert (tags.count("script"), tags.count("img")) == (3, 0)
    assert f"-{EVIL} 1\n" in page.text
    assert EVIL not in json.dumps(page.figures)  # Plotly would read markup in it


@pytest.mark.browser
@pytest.mark.long
def test_a_browser_draws_the_page(store: CheckpointStore, tmp_path: Path) -> None:
    """Every figure, without a request, a message in the console or a stranger's script."""
    trials = [read_trial(store, add(store, n, tmp_path, **{EVIL: n})) for n in range(1, 11)]
    path = tmp_path / "compared.html"
    path.write_text(comparison_page(trials, store), encoding="utf-8")
    with chromium() as browser:
        browser.open(path.as_uri(), "10 trials of gpt")
        run = browser._driver.execute_script
        # Three groups by rank in each figure, and an axis for each of two names and the metric.
        count = "return document.querySelectorAll('.scatter').length"
        browser.wait_for(lambda: bool(run(count) == 3 * 3 + 3), "the lines")
        assert run("return performance.getEntriesByType('resource').length") == 0
        assert run("return window.injected") is None
        assert browser._driver.get_log("browser") == []
