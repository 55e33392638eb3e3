"""That tables of figures are written from the history, whose latest lines count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.all import ORDER
from benchmarks.page import HISTORY, PAGES, ROWS, latest, page, read, table


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_is_that_of_the_history(path: Path) -> None:
    """After a new line, `python -m benchmarks.page` has to write the pages again."""
    text = path.read_text()
    assert page(text, PAGES[path](read(HISTORY))) == text


def test_the_page_has_words_for_every_benchmark() -> None:
    """Else it would show the bare names of figures."""
    assert ROWS.keys() == {*ORDER}


def line(name: str, date: str, **more: Any) -> dict[str, Any]:
    """A line of a history."""
    return {
        "name": name,
        "arguments": "",
        "date": f"{date}T10:00:00+00:00",
        "commit": "abc",
        **more,
    }


def test_the_latest_line_of_each_name_wins() -> None:
    """A benchmark that the page has no words for is shown by the names of its figures."""
    targets = {"seconds_1_rank": 3.0}
    lines = [
        line("new", "2030-01-01", figures={"cores": 4, "seconds_1_rank": 5.0}, targets=targets),
        line("start", "2030-01-02", failed="exit code 1"),
        line(
            "new", "2030-01-03", arguments="--ranks 1", targets=targets,
            figures={"cores": 8, "seconds_1_rank": 2.0, "other": 7.0},
        ),
    ]  # fmt: skip
    assert latest(lines) == {"start": lines[1], "new": lines[2]}
    assert table(lines).splitlines()[2:] == [
        "| `start` | failed: exit code 1 |  |  | **no** | 2030-01-02 |  "
        "| `make bench NAME=start` |",
        "| `new` | `seconds_1_rank` | 2 | ≤ 3 | yes | 2030-01-03 | 8 CPU cores "
        '| `make bench NAME=new ARGS="--ranks 1"` |',
    ]


def test_goodput_with_repeated_failures_is_a_row_for_each_number_of_ranks() -> None:
    """It replaces neither the other's line nor that of the listed failures."""
    every = [{"every_ranks": 2}, {"every_ranks": 4}, {"every_ranks": 2}]
    lines = [{"name": "goodput", "figures": each} for each in ({}, *every)]
    found = latest(lines)
    assert [*found.values()] == [lines[0], lines[3], lines[2]]


def test_a_line_of_one_part_of_continuous_checkpoints_replaces_no_other() -> None:
    """That of a storage on another machine."""
    both = {"overhead_percent": 40, "remote_overhead_percent": 9}
    lines = [
        {"name": "continuous", "figures": each} for each in (both, {"remote_overhead_percent": 4})
    ]
    assert [*latest(lines).values()] == lines


def test_cases_share_a_row() -> None:
    """With their intervals; one that misses the target is enough."""
    figures = {"ratio_1_rank": 1.0, "ratio_2_ranks": 1.5}
    figures |= {"ratio_low_1_rank": 0.75, "ratio_high_1_rank": 1.25}
    targets = {"ratio_1_rank": 1.1, "ratio_2_ranks": 1.1}
    (row,) = table([line("report", "2030-01-01", figures=figures, targets=targets)]).splitlines()[
        2:
    ]
    assert "| 1 rank: 1 (0.75…1.25); 2 ranks: 1.5 | ≤ 1.1 | **no** |" in row


def test_a_line_holds_if_its_figures_do() -> None:
    """The page repeats what was judged when the benchmark ran."""
    for each in read(HISTORY):
        if "figures" in each:
            missed = [
                name for name, most in each["targets"].items() if each["figures"][name] > most
            ]
            assert each["holds"] is (not missed), each


def test_a_page_without_the_comments_is_left_as_it_is() -> None:
    """Else the table would replace what a person wrote."""
    with pytest.raises(ValueError, match="lacks"):
        page("# Benchmarks\n", "")
