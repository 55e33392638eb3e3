"""Which curves share a figure, and on which axis; and curves as Mermaid charts."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence

from trial_core.observe.report.curves import CurveFigure, MeasuredLine, charts, figures
from trial_core.observe.report.history import ReportHistory

Points = Sequence[tuple[int, float]]


def history(**curves: dict[int, dict[str, float]]) -> ReportHistory:
    """A history with these points: metrics by batch, by kind."""
    made = ReportHistory()
    for kind, points in curves.items():
        for batches, metrics in points.items():
            made.add_point(kind, batches, metrics)  # type: ignore[arg-type]
    return made


def drawn(found: list[CurveFigure]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """The points of each line, by figure."""
    return {each.title: {line.name: list(line.points) for line in each.lines} for each in found}


def test_training_and_validation_of_a_metric_share_a_figure() -> None:
    """Each line has its own measured points, and no others."""
    made = history(
        training={10: {"loss": 4.0}, 20: {"loss": 3.0}, 27: {"loss": 2.0}},
        validation={20: {"loss": 3.5, "accuracy": 0.5}},
    )
    assert drawn(figures(made, "accuracy")) == {
        "loss": {"training": [(10, 4.0), (20, 3.0), (27, 2.0)], "validation": [(20, 3.5)]},
        "accuracy": {"validation": [(20, 0.5)]},
    }


def test_a_prefix_that_names_the_kind_is_no_other_metric() -> None:
    """`validation_loss` belongs to `loss`; a prefix alone does not rename a metric."""
    made = history(
        training={10: {"loss": 4.0, "train_acc": 0.1}},
        validation={10: {"validation_loss": 3.5, "val_acc": 0.2, "val_only": 1.0}},
    )
    assert drawn(figures(made, "val_only")) == {
        "loss, validation_loss": {"training": [(10, 4.0)], "validation": [(10, 3.5)]},
        "val_only": {"validation": [(10, 1.0)]},
        "train_acc, val_acc": {"training": [(10, 0.1)], "validation": [(10, 0.2)]},
    }


def test_two_metrics_of_one_kind_never_share_a_line() -> None:
    """Of `loss` and `train_loss`, the one without a prefix has the validation beside it."""
    made = history(
        training={10: {"train_loss": 5.0, "loss": 4.0}}, validation={10: {"val_loss": 3.5}}
    )
    assert drawn(figures(made, "val_loss")) == {
        "loss, val_loss": {"training": [(10, 4.0)], "validation": [(10, 3.5)]},
        "train_loss": {"training": [(10, 5.0)]},
    }


def test_throughput_and_learning_rate_have_figures_of_their_own() -> None:
    """They come last, and never beside a metric."""
    made = history(
        learning_rate={10: {"learning rate": 0.1}},
        speed={10: {"samples/s": 400.0, "tokens/s": 8000.0}},
        training={10: {"loss": 4.0, "samples/s": 1.0}},
    )
    assert list(drawn(figures(made, "loss"))) == [
        "loss", "samples/s", "throughput (samples/s)", "throughput (tokens/s)", "learning rate",
    ]  # fmt: skip


def test_a_logarithmic_axis() -> None:
    """Where positive values span more than two decades, over both lines; never at zero."""

    def is_log(*lines: list[float]) -> bool:
        named = [MeasuredLine("loss", "", list(enumerate(values))) for values in lines]
        return CurveFigure(named).is_log

    assert is_log([500.0, 50.0], [4.0])
    assert not is_log([400.0, 50.0], [4.0])
    assert not is_log([500.0, 0.0])
    assert not is_log([500.0, -1.0])
    assert not is_log([500.0])


def test_no_figure_is_empty() -> None:
    """A metric that was never a finite number has none."""
    made = history(training={10: {"loss": math.nan}, 20: {"loss": math.inf}})
    assert figures(made, "loss") == []


def in_mermaid(title: str, **lines: Points) -> list[tuple[str, list[int], list[list[float]]]]:
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
    (chart,) = in_mermaid("loss", training=[(10, 4.0), (20, 3.0), (27, 2.5), (80, 1.0)])
    assert chart == ("loss: training (blue) 1", [10, 20, 27, 80], [[4.0, 3.0, 2.5, 1.0]])


def test_training_and_validation_in_one_chart() -> None:
    """At the batches where both were measured, because Mermaid's lines have no gaps."""
    (chart,) = in_mermaid(
        "loss",
        training=[(10, 4.0), (20, 3.0), (30, 2.0)],
        validation=[(0, 9.0), (20, 3.5), (30, 3.25)],
    )
    title = "loss: training (blue) 2, validation (orange) 3.25"
    assert chart == (title, [20, 30], [[3.0, 2.0], [3.5, 3.25]])


def test_a_line_that_would_lose_half_its_points_has_a_chart_too() -> None:
    """Training reports that have no validation beside them are not hidden."""
    training = [(10 * i, 1.0 * i) for i in range(1, 9)]
    both, alone = in_mermaid("loss", training=training, validation=[(40, 7.0), (80, 6.0)])
    assert both[1:] == ([40, 80], [[4.0, 8.0], [7.0, 6.0]])
    assert alone[1:] == ([batches for batches, _ in training], [[v for _, v in training]])


def test_lines_without_a_common_batch_have_charts_of_their_own() -> None:
    """A chart needs two points."""
    training, one = [(10, 4.0), (20, 3.0)], [(15, 5.0)]
    (chart,) = in_mermaid("loss", training=training, validation=one)
    assert chart == ("loss: training (blue) 3", [10, 20], [[4.0, 3.0]])


def test_a_long_curve_is_thinned_to_measured_points() -> None:
    """Both ends stay, as many points as have room for their batch, and the chart says so."""
    curve = [(i, 1000.0 + i) for i in range(1, 1001)]
    ((_, places, (values,)),) = in_mermaid("loss", training=curve)
    assert (places[0], places[-1]) == (1, 1000)
    assert 20 <= len(places) <= 40
    assert values == [1000.0 + batches for batches in places]
    figure = CurveFigure([MeasuredLine("loss", "training", curve)])
    assert f"{len(places)} of 1000 points" in "\n".join(charts(figure))


def test_values_over_more_than_two_decades_are_drawn_as_logarithms() -> None:
    """Mermaid has no logarithmic axis; the axis says so, and the title has the value."""
    curve = [(1, 1000.0), (2, 10.0), (3, 0.1)]
    ((title, _, (values,)),) = in_mermaid("loss", training=curve)
    assert (title, values) == ("loss: training (blue) 0.1", [3, 1, -1])
    text = "\n".join(charts(CurveFigure([MeasuredLine("loss", "training", curve)])))
    assert 'y-axis "log10"' in text


def test_values_have_no_exponent() -> None:
    """Mermaid's grammar has none."""
    ((_, _, (values,)),) = in_mermaid("loss", training=[(1, 2.5e-07), (2, 2e-07)])
    assert values == [2.5e-07, 2e-07]
    text = "\n".join(charts(CurveFigure([MeasuredLine("loss", "", [(1, 2.5e-07), (2, 2e-07)])])))
    assert "line [0.00000025, 0.0000002]" in text


def test_a_name_gives_mermaid_no_directive() -> None:
    """Mermaid looks for one in all of its text."""
    name = '%%{init: {"themeCSS": "* {display: none}"}}%%'
    ((title, _, _),) = in_mermaid(name, training=[(1, 1.0), (2, 0.5)])
    assert "%{" not in title


def test_quotes_in_a_name_do_not_end_a_title() -> None:
    """Mermaid has no escape for them, and would read what follows as a statement."""
    made = history(training={10: {'a" x-axis "b': 4.0}, 20: {'a" x-axis "b': 2.0}})
    (title,) = re.findall(
        r"^  title (.*)$", "\n".join(charts(figures(made, "loss")[0])), re.MULTILINE
    )
    assert title == "\"a' x-axis 'b: training (blue) 2\""
