"""Curves as Mermaid charts."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from trial_core.observe.report.curves import CurveFigure, MeasuredLine
from trial_core.observe.report.mermaid import charts

Points = Sequence[tuple[int, float]]


def drawn(title: str, **lines: Points) -> list[tuple[str, list[int], list[list[float]]]]:
    """Title, batches and lines of each chart."""
    figure = CurveFigure([MeasuredLine(title, name, points) for name, points in lines.items()])
    text = "\n".join(charts(figure))
    found = []
    for chart in re.findall(r"^```mermaid\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        (title_line,) = re.findall(r'^  title "(.*)"$', chart, flags=re.MULTILINE)
        (places,) = re.findall(r'^  x-axis "batch" (\[.*\])$', chart, flags=re.MULTILINE)
        values = re.findall(r"^  line (\[.*\])$", chart, flags=re.MULTILINE)
        found.append((title_line, json.loads(places), [json.loads(line) for line in values]))
    return found


def test_points_are_where_something_was_measured() -> None:
    """At their batches, whatever the distances; nothing lies between them."""
    (chart,) = drawn("loss", training=[(10, 4.0), (20, 3.0), (27, 2.5), (80, 1.0)])
    assert chart == ("loss: training (blue) 1", [10, 20, 27, 80], [[4.0, 3.0, 2.5, 1.0]])


def test_training_and_validation_in_one_chart() -> None:
    """At the batches where both were measured, because Mermaid's lines have no gaps."""
    (chart,) = drawn(
        "loss",
        training=[(10, 4.0), (20, 3.0), (30, 2.0)],
        validation=[(0, 9.0), (20, 3.5), (30, 3.25)],
    )
    title = "loss: training (blue) 2, validation (orange) 3.25"
    assert chart == (title, [20, 30], [[3.0, 2.0], [3.5, 3.25]])


def test_a_line_that_would_lose_half_its_points_has_a_chart_too() -> None:
    """Training reports that have no validation beside them are not hidden."""
    training = [(10 * i, 1.0 * i) for i in range(1, 9)]
    both, alone = drawn("loss", training=training, validation=[(40, 7.0), (80, 6.0)])
    assert both[1:] == ([40, 80], [[4.0, 8.0], [7.0, 6.0]])
    assert alone[1:] == ([batches for batches, _ in training], [[v for _, v in training]])


def test_lines_without_a_common_batch_have_charts_of_their_own() -> None:
    """A chart needs two points."""
    training, one = [(10, 4.0), (20, 3.0)], [(15, 5.0)]
    (chart,) = drawn("loss", training=training, validation=one)
    assert chart == ("loss: training (blue) 3", [10, 20], [[4.0, 3.0]])


def test_a_long_curve_is_thinned_to_measured_points() -> None:
    """Both ends stay, as many points as have room for their batch, and the chart says so."""
    curve = [(i, 1000.0 + i) for i in range(1, 1001)]
    ((_, places, (values,)),) = drawn("loss", training=curve)
    assert (places[0], places[-1]) == (1, 1000)
    assert 20 <= len(places) <= 40
    assert values == [1000.0 + batches for batches in places]
    figure = CurveFigure([MeasuredLine("loss", "training", curve)])
    assert f"{len(places)} of 1000 points" in "\n".join(charts(figure))


def test_values_over_more_than_two_decades_are_drawn_as_logarithms() -> None:
    """Mermaid has no logarithmic axis; the axis says so, and the title has the value."""
    curve = [(1, 1000.0), (2, 10.0), (3, 0.1)]
    ((title, _, (values,)),) = drawn("loss", training=curve)
    assert (title, values) == ("loss: training (blue) 0.1", [3, 1, -1])
    text = "\n".join(charts(CurveFigure([MeasuredLine("loss", "training", curve)])))
    assert 'y-axis "log10"' in text


def test_values_have_no_exponent() -> None:
    """Mermaid's grammar has none."""
    ((_, _, (values,)),) = drawn("loss", training=[(1, 2.5e-07), (2, 2e-07)])
    assert values == [2.5e-07, 2e-07]
    text = "\n".join(charts(CurveFigure([MeasuredLine("loss", "", [(1, 2.5e-07), (2, 2e-07)])])))
    assert "line [0.00000025, 0.0000002]" in text
