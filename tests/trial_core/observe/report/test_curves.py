"""Which curves share a figure, and on which axis."""

from __future__ import annotations

import math

from trial_core.observe.report.curves import CurveFigure, MeasuredLine, figures
from trial_core.observe.report.history import ReportHistory


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
