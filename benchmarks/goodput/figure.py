"""Draws the curves of all contestants as SVG: trained batches over time, with failures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 420, 56, 120, 16, 44
COLORS = ("#1f5fbf", "#d1495b", "#2e8b57", "#b8860b", "#7b4ea3")


def drawn(results: Mapping[str, Mapping[str, Any]], batches: int) -> str:
    """Return the figure's SVG text.

    Args:
        results: the benchmark's results, with a ``curve`` by contestant.
        batches: the number of batches of a whole run.
    """
    most = max(it["seconds_with_failures"] for it in results.values())

    def place(seconds: float, batch: float) -> tuple[float, float]:
        x = LEFT + seconds / most * (WIDTH - LEFT - RIGHT)
        return x, HEIGHT - BOTTOM - batch / batches * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    for step in range(6):
        x, y = place(most * step / 5, batches * step / 5)
        base = HEIGHT - BOTTOM
        parts.append(f'<path d="M{LEFT} {y:.0f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{batches * step / 5:.0f}", "end"))
        parts.append(_text(x, base + 18, f"{most * step / 5:.0f} s", "middle"))
    parts.append(_text(LEFT, TOP - 4, "batches"))
    for color, it in zip(COLORS, results.values(), strict=False):
        points = [*it["curve"], (it["seconds_with_failures"], batches)]
        path = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.8"/>')
    ranked = sorted(zip(COLORS, results, strict=False), key=lambda it: -results[it[1]]["goodput"])
    for row, (color, name) in enumerate(ranked):
        y = TOP + 14 + 20 * row
        shown = f"{name} {results[name]['goodput']:.2f}"
        parts.append(_text(WIDTH - RIGHT + 10, y, shown, color=color))
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, text: str, anchor: str = "start", color: str = "#333") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="{color}">{text}</text>'
