"""Curves as Mermaid charts, which Prefect's UI draws."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from decimal import Decimal
from itertools import pairwise

from trial_core import text_format

MAX_STEPS = 60
# Mermaid's default colour is nearly white on a white page.
SETTINGS = (
    '%%{init: {"xyChart": {"width": 900, "height": 320}, '
    '"themeVariables": {"xyChart": {"plotColorPalette": "#2563eb"}}}}%%'
)


def chart(title: str, curve: Sequence[tuple[int, float]]) -> list[str]:
    """The lines of a chart over batches.

    Args:
        curve: (batches, value), at least two, in the order of batches.
    """
    quoted = text_format.one_line(title).replace('"', "'")
    first, last = curve[0][0], curve[-1][0]
    values = ", ".join(_plain(value) for value in evenly(curve))
    return [
        "```mermaid",
        SETTINGS,
        "xychart-beta",
        f'  title "{quoted}"',
        f'  x-axis "batch" {first} --> {last}',
        f"  line [{values}]",
        "```",
        "",
    ]


def evenly(curve: Sequence[tuple[int, float]]) -> list[float]:
    """The curve's values at equal distances, which Mermaid needs.

    These are the curve's own points if they are few and equidistant, else interpolated values.
    """
    first, last = curve[0][0], curve[-1][0]
    steps = {after[0] - before[0] for before, after in pairwise(curve)}
    if len(steps) == 1 and len(curve) <= MAX_STEPS + 1:
        return [value for _, value in curve]
    places = [batches for batches, _ in curve]
    return [
        _between(curve, places, first + (last - first) * i / MAX_STEPS)
        for i in range(MAX_STEPS + 1)
    ]


def _between(curve: Sequence[tuple[int, float]], places: list[int], at: float) -> float:
    after = max(1, min(bisect_left(places, at), len(curve) - 1))
    (x0, y0), (x1, y1) = curve[after - 1], curve[after]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


def _plain(value: float) -> str:
    """Six digits without an exponent, which Mermaid's grammar does not have."""
    return f"{Decimal(f'{value:.6g}'):f}"
