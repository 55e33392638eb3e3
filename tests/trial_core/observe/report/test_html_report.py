"""The report as a page: one file, its curves, and text that a stranger may have written."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import chromium
from trial_core.observe.report.history import SavedCheckpoint
from trial_core.observe.report.html_report import _markdown, render_html
from trial_core.observe.report.trial_report import TrialFacts

EVIL = "</script><script>window.injected = 1</script><img src=x onerror=window.injected=1>"


class Page(HTMLParser):
    """A page's tags, its visible text, and the figures that its script draws."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.figures: list[dict[str, Any]] = []
        self._inside: tuple[str, dict[str, str | None]] = ("", {})
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag, dict(attrs)
        self.tags.append(self._inside)

    def handle_endtag(self, tag: str) -> None:
        self._inside = "", {}

    def handle_data(self, data: str) -> None:
        tag, attributes = self._inside
        if tag not in ("script", "style"):
            self.text += data
        elif attributes.get("type") == "application/json":
            self.figures = json.loads(data)


@pytest.fixture
def facts() -> TrialFacts:
    """The facts of a run with four reports, two validations and a checkpoint."""
    made = TrialFacts("toy", "toy-0000beef", "loss", True, "s3://b/checkpoints")
    for batches, loss in ((10, 400.0), (20, 40.0), (30, 4.0), (40, 1.23456)):
        made.history.add_point("training", batches, {"loss": loss})
        made.history.add_point("speed", batches, {"samples/s": 160.0})
    made.history.add_point("validation", 20, {"loss": 50.0})
    made.history.add_point("validation", 40, {"loss": 2.0})
    made.history.add_checkpoint(
        SavedCheckpoint(uuid="uuid-40", batches=40, total_bytes=3 * 2**20, metric=2.0), True
    )
    made.history.add_event(30, "resumed from the last checkpoint")
    made.last["training"] = (40, {"loss": 1.23456})
    return made


def test_the_page_needs_no_network(facts: TrialFacts) -> None:
    """It loads nothing, and the browser is told to refuse what would."""
    page = Page(render_html(facts))
    attributes = {name for _, found in page.tags for name in found}
    assert attributes.isdisjoint({"src", "href", "srcset", "action"})
    (policy,) = [
        found["content"] or ""
        for tag, found in page.tags
        if tag == "meta" and found.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy.startswith("default-src 'none';")
    assert "http" not in policy
    scripts = [found for tag, found in page.tags if tag == "script" and "nonce" in found]
    (nonce,) = {found["nonce"] for found in scripts}
    assert f"; script-src 'nonce-{nonce}'; " in policy  # no script without it


def test_it_has_the_facts_of_the_report(facts: TrialFacts) -> None:
    """Progress, last metrics, checkpoints and restarts."""
    facts.run_status.run_started("toy-0000beef", 80, 0, 16)
    facts.run_status.batches_trained(40)
    text = " ".join(Page(render_html(facts)).text.split())
    assert "running · batch 40 of 80 · trial toy-0000beef" in text
    assert "training 40 loss 1.235" in text
    assert "40 uuid-40 3.0 MiB 2 (best)" in text
    assert "30 resumed from the last checkpoint" in text


def test_it_says_what_a_long_stage_does(facts: TrialFacts) -> None:
    """As the report in Markdown: a build takes minutes, in which nothing else changes."""
    facts.run_status.stage_started("build-trial", "")
    facts.run_status.stage_takes_long("compiling cpu_adam, for 18 s")
    text = " ".join(Page(render_html(facts)).text.split())
    assert "now: build-trial: compiling cpu_adam, for 18 s" in text


def test_figures_have_measured_points_and_their_last_value(facts: TrialFacts) -> None:
    """Both lines of a metric in one figure, a point per measurement, a log axis from 400 to 1.2."""
    loss, throughput = Page(render_html(facts)).figures
    training, validation = loss["data"]
    assert (training["name"], validation["name"]) == ("training", "validation")
    assert training["x"] == [10, 20, 30, 40]
    assert training["y"] == [400.0, 40.0, 4.0, 1.23456]
    assert (validation["x"], validation["y"]) == ([20, 40], [50.0, 2.0])
    assert training["mode"] == "lines+markers+text"
    assert training["text"] == ["", "", "", "1.235"]
    assert validation["text"] == ["", "2"]
    assert loss["layout"]["yaxis"]["type"] == "log"
    assert throughput["layout"]["yaxis"]["type"] == "linear"


def test_last_values_that_are_close_do_not_overlap(facts: TrialFacts) -> None:
    """One is written above its point, the other below; else both at their height."""

    def places(validation: float) -> list[str]:
        facts.history.add_point("validation", 40, {"loss": validation})
        loss, _ = Page(render_html(facts)).figures
        return [line["textposition"] for line in loss["data"]]

    assert places(1.25) == ["bottom right", "top right"]
    assert places(1.2) == ["top right", "bottom right"]
    assert places(300.0) == ["middle right", "middle right"]


def test_a_constant_has_an_axis_from_zero(facts: TrialFacts) -> None:
    """Else a learning rate of 0.0003 lies on an axis from -1 to 1."""

    def range_of(value: float) -> Any:
        facts.history.curves.clear()
        facts.history.add_point("learning_rate", 10, {"learning rate": value})
        facts.history.add_point("learning_rate", 20, {"learning rate": value})
        (figure,) = Page(render_html(facts)).figures
        return figure["layout"]["yaxis"].get("range")

    assert (range_of(0.5), range_of(-0.5), range_of(0.0)) == ([0, 1], [-1, 0], None)


def test_every_tick_is_a_batch_and_they_are_few(facts: TrialFacts) -> None:
    """A tick per batch only on a short axis: axes begin at 0, and 150,000 ticks end a browser."""

    def axis(batches: int) -> dict[str, Any]:
        facts.history.curves.clear()
        facts.history.add_point("validation", batches, {"loss": 1.0})
        (figure,) = Page(render_html(facts)).figures
        return dict(figure["layout"]["xaxis"])

    assert axis(3)["dtick"] == 1
    assert "dtick" not in axis(150_000)
    assert axis(150_000)["rangemode"] == "tozero"


def test_a_stranger_writes_no_markup(facts: TrialFacts) -> None:
    """Names of metrics, of the experiment, of hosts, and messages are text."""
    clean = Page(render_html(facts))
    facts.name = facts.status = facts.searcher_metric = EVIL
    facts.locations = {EVIL: EVIL}
    facts.history.add_point("training", 50, {EVIL: 1.0})
    facts.last["validation"] = (50, {EVIL: EVIL})
    facts.history.add_event(50, EVIL)
    page = Page(render_html(facts))
    assert "onerror" in page.text
    for tag in ("script", "img"):
        assert [t for t, _ in page.tags].count(tag) == [t for t, _ in clean.tags].count(tag)
    assert len(page.figures) == len(clean.figures) + 1
    assert EVIL not in json.dumps(page.figures)  # Plotly would read markup in it


@pytest.mark.parametrize(
    "text", ["_x_", "__x__", "a_b", "*x*", "`x", "a|b", "&lt;", "[x](y)", "\\|"]
)
def test_markdown_in_a_name_stays_text(facts: TrialFacts, text: str) -> None:
    """The page is made of Markdown; names of metrics, files and of the experiment are none."""
    clean = Page(render_html(facts))
    facts.name, facts.last["validation"] = text, (50, {text: text})
    facts.locations = {text: f"/home/{text}"}
    page = Page(render_html(facts))
    assert f"\n{text}\nrunning" in page.text
    assert f"\nvalidation\n50\n{text}\n{text}\n" in page.text
    assert f"\n{text}: /home/{text.replace('`', chr(39))}\n" in page.text
    added = {tag for tag, _ in page.tags} - {tag for tag, _ in clean.tags}
    assert added <= {"ul", "li"}


@pytest.mark.browser
@pytest.mark.long
def test_a_browser_draws_the_page(facts: TrialFacts, tmp_path: Path) -> None:
    """Every figure, without a request or a stranger's script; its points can be hovered over."""
    facts.history.add_point("training", 50, {EVIL: 1.0})
    path = tmp_path / "report.html"
    path.write_text(render_html(facts))
    with chromium() as browser:
        browser.open(path.as_uri(), "toy-0000beef")
        run = browser._driver.execute_script
        count = "return document.querySelectorAll('{}').length"
        browser.wait_for(lambda: bool(run(count.format(".scatter")) == 4), "four lines")
        assert run(count.format(".scatter .point")) == 11
        buttons = run(
            "return [...document.querySelectorAll('.modebar-btn')].map(b => b.dataset.title)"
        )
        # None of them sends the data to a service of Plotly's.
        assert set(buttons) == {
            "Zoom", "Zoom in", "Zoom out", "Reset axes", "Download plot as a PNG"
        }  # fmt: skip
        assert run("return performance.getEntriesByType('resource').length") == 0
        assert run("return window.injected") is None
        assert browser._driver.get_log("browser") == []


@pytest.mark.browser
@pytest.mark.long
def test_all_columns_of_the_tables_fit_a_phone(facts: TrialFacts, tmp_path: Path) -> None:
    """At a width of 420 px no table has to be scrolled sideways, and no size is broken in two."""
    facts.searcher_metric = "validation_accuracy"
    facts.history.checkpoints.clear()
    for batches in (100, 200):
        facts.history.add_checkpoint(
            SavedCheckpoint(
                uuid=f"d257a7e1-f924-455d-b2c0-99f222e4f{batches}", batches=batches,
                total_bytes=700 * 2**20, blocked_seconds=12.5, upload_seconds=83.0,
                metric=0.98765,
            ),
            True,
        )  # fmt: skip
    path = tmp_path / "report.html"
    path.write_text(render_html(facts))
    with chromium() as browser:
        size = {"width": 420, "height": 900, "deviceScaleFactor": 1, "mobile": True}
        browser._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.open(path.as_uri(), "toy-0000beef")
        hidden = browser._driver.execute_script(
            "return [...document.querySelectorAll('table')].map(t => t.scrollWidth - t.clientWidth)"
        )
        assert hidden == [0] * len(hidden)
        assert len(hidden) == 3
        assert "700.0 MiB" in browser.text or "700 MiB" in browser.text


def test_markup_that_was_not_escaped_is_text_too() -> None:
    """The page's renderer passes no HTML on, also where a template forgets to escape a name."""
    assert "<" not in _markdown().render(f"A {EVIL}").replace("<p>", "").replace("</p>", "")
