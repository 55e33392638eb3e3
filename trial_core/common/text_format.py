"""Formats numbers, times and untrusted text for terminals and reports."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, TypeGuard

SHOWN_NUMBERS = 6
"""Of an array; a larger one is summarized."""
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

SHORT_UUID = 8
"""So many characters of a uuid are shown at least."""


def clean(text: str) -> str:
    """`text` without control characters: it cannot move the cursor or set colours."""
    return _CONTROL.sub("", _ESCAPE.sub("", text))


def one_line(text: str) -> str:
    """The first line that is not blank, cleaned."""
    return next((line.strip() for line in clean(text).splitlines() if line.strip()), "")


def shortened(text: str, most: int = 500) -> str:
    """`one_line` of a text, of at most `most` characters."""
    line = one_line(text)
    return line if len(line) <= most else f"{line[: most - 1]}…"


def last_line(text: str) -> str:
    """The last line that is not blank: the final words of a program or an error."""
    return next((line.strip() for line in reversed(text.split("\n")) if line.strip()), "")


def slug(name: str) -> str:
    """A name as part of an id: lower case letters, digits and dashes.

    Several names may have one slug: use it only together with something unique.
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60] or "trial"


def unique_slug(name: str) -> str:
    """A name as a unique key of lower case letters, digits and dashes.

    A name of these characters is its own key. Any other name gets a digest.
    """
    if re.fullmatch(r"[a-z0-9-]{1,250}", name):
        return name
    return f"{slug(name)}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def number(value: Any) -> str:
    """A metric's value with 4 significant digits: ``0.03142``, ``48676``, ``2.5e-07``.

    A whole part has all its digits, up to a billion. Final zeros mean that digits were left out:
    3.69996 is ``3.700``, and 3.7 is ``3.7``. Of a large array: ``[8×64: mean 0.1, -2 to 3.5]``.
    """
    if isinstance(value, list):
        return clean(_array(value))
    if not isinstance(value, float):
        return clean(str(value))
    if 1e3 <= abs(value) < 1e9:
        return f"{value:.0f}"
    short = f"{value:.4g}"
    return short if float(short) == value else f"{value:#.4g}".rstrip(".")


def _array(value: list[Any]) -> str:
    """Nested lists as text; those of more numbers than a line shows as shape, mean and range."""
    shape, numbers, is_even = [len(value)], value, True
    while numbers and all(isinstance(each, list) for each in numbers):
        shape.append(len(numbers[0]))
        is_even = is_even and all(len(each) == shape[-1] for each in numbers)
        numbers = [*itertools.chain.from_iterable(numbers)]
    if len(numbers) <= SHOWN_NUMBERS or not all(map(is_number, numbers)):
        return str(value)
    shown = "×".join(map(str, shape)) if is_even else f"{len(numbers)} numbers"
    try:
        mean = fmean(numbers)
    except (ValueError, OverflowError):  # both infinities, or a sum that is too large
        mean = math.nan
    low, high = (number(float(each)) for each in (min(numbers), max(numbers)))
    return f"[{shown}: mean {number(mean)}, {low} to {high}]"


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a metric's value is a single number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_finite_number(value: Any) -> TypeGuard[float]:
    """Return whether a metric's value is a single number, neither NaN nor infinite."""
    return is_number(value) and finite(value) is not None


def finite(value: float) -> float | None:
    """The number, or None if it is NaN, infinite or too large for a float."""
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number of hundreds of digits
        return None


def finite_numbers(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """The metrics that are single numbers, for JSON; None for one that is not `finite`."""
    return {name: finite(value) for name, value in metrics.items() if is_number(value)}


def main_metric(metrics: Mapping[str, Any], preferred: Iterable[str]) -> tuple[str, Any] | None:
    """The name and value of one metric: the first preferred one, else the first number."""
    numbers = {name: value for name, value in metrics.items() if is_number(value)}
    for name in (*preferred, *numbers):
        if name in numbers:
            return name, numbers[name]
    return None


def metrics_line(metrics: Mapping[str, Any]) -> str:
    """All metrics on one line: ``loss 0.25 · accuracy 0.91``."""
    shown = [f"{clean(name)} {one_line(number(value))}" for name, value in metrics.items()]
    return " · ".join(shown)


def duration(seconds: float) -> str:
    """``0.4 s``, ``12 s``, ``3 min 05 s``, ``2 h 03 min``."""
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def clock(seconds: float) -> str:
    """``0:42``, ``12:05``, ``2:03:09``: a stable width, for a display that is redrawn."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def size(size_bytes: int) -> str:
    """``812 B``, ``1.2 MiB``."""
    amount, unit = float(size_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"


def rate(per_second: float, unit: str) -> str:
    """``4.0 batches/s``, ``412 samples/s``, ``105k tokens/s``, ``1.2M tokens/s``."""
    letter = ""
    if per_second >= 10_000:
        per_second, letter = per_second / 1000, "k"
    if per_second >= 1000 and letter:
        per_second, letter = per_second / 1000, "M"
    digits = 0 if per_second >= 100 else 1
    return f"{per_second:.{digits}f}{letter} {unit}"


def utilisation(mfu: float) -> str:
    """``38 % MFU``, ``3.8 % MFU``."""
    return f"{100 * mfu:.{0 if mfu >= 0.1 else 2 if mfu < 0.01 else 1}f} % MFU"


def ranks_by_node(nodes: Sequence[str]) -> str:
    """``ranks 0-1 on gpu-7, 2-3 on gpu-8``: the node of each rank, in the order of ranks."""
    parts = []
    for node, group in itertools.groupby(range(len(nodes)), lambda rank: nodes[rank]):
        ranks = list(group)
        span = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
        parts.append(f"{span} on {node}")
    return f"rank{'s' if len(nodes) > 1 else ''} {', '.join(parts)}"


def first_few(names: Collection[str], shown: int = 3, between: str = ", ") -> str:
    """The first few names, and the number of the others."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return between.join([*names][:shown]) + more


def told_apart(one: Any, other: Any) -> tuple[str, str]:
    """Two different settings as text, with enough digits to tell them apart."""
    short = setting(one), setting(other)
    return short if short[0] != short[1] else (shortened(repr(one)), shortened(repr(other)))


def setting(value: Any) -> str:
    """The value of a setting, such as a hyperparameter: ``0.001``, ``[0.9, 0.999]``, ``adam``."""
    if isinstance(value, (list, tuple)):
        return shortened(f"[{', '.join(map(setting, value))}]", 60)
    if isinstance(value, float):
        return f"{value:.6g}"  # a float32 has no more digits
    return shortened(str(value), 60) or repr(value)


def plural(count: int, noun: str) -> str:
    """``1 file``, ``2 files``, ``2 batches``."""
    ending = "es" if noun.endswith(("tch", "nch")) else "s"  # not epochs
    return f"{count} {noun}{ending if count != 1 else ''}"


def ordinal(place: int) -> str:
    """``1st``, ``2nd``, ``111th``."""
    ending = "th" if 10 <= place % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(place % 10, "th")
    return f"{place}{ending}"


def flat(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Each value of nested mappings, with its dotted name: ``("model.depth", 12)``."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def trial_number(trial: str) -> int | None:
    """The number at the end of a trial's id, 42 for ``gpt-00000000002a``; None without one."""
    try:
        return int(trial.rpartition("-")[2], 16)
    except ValueError:
        return None
