"""Writes the page of DeepSpeed's features from the results of their tests.

``python -m tests.trial_core.deepspeed.features.page REPORT.xml`` takes the report of pytest
(``--junitxml``) into ``results.json``, and writes the page. Rows that were not run keep their
results.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from xml.etree import ElementTree

import deepspeed
import torch

from tests.trial_core.deepspeed.features.feature import COLUMNS, Cell, Column, Feature
from tests.trial_core.deepspeed.features.matrix import FEATURES

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "docs" / "reference" / "deepspeed-features.md"
RESULTS = Path(__file__).with_name("results.json")
FAILED = "**not what the matrix says**"
HEAD = Path(__file__).with_name("page_head.md").read_text()


def page(features: Sequence[Feature], results: Mapping[str, Mapping[str, str]]) -> str:
    """The page.

    Raises:
        ValueError: the results are not those of these features.
    """
    tried = {feature.name for feature in features if feature.own_columns}
    if odd := sorted(results.keys() ^ tried):
        raise ValueError(f"only one of results and matrix has {odd}: run `make features`")
    runs = sorted({result["run"] for result in results.values()})
    notes: list[str] = []
    parts = [HEAD.replace("{run}", "; ".join(runs) + ".")]
    for heading, rows in groupby(features, key=lambda feature: feature.heading):
        parts.append(f"\n## {heading}\n\n| row | what | {' | '.join(COLUMNS)} |\n|{'---|' * 7}")
        parts.extend(f"\n{_row(feature, results.get(feature.name, {}), notes)}" for feature in rows)
        parts.append("\n")
    if notes:
        parts.append("\n## Other tests\n\n")
    parts.extend(f"{number}. `{test}`\n" for number, test in enumerate(notes, 1))
    return "".join(parts)


def _row(feature: Feature, results: Mapping[str, str], notes: list[str]) -> str:
    cells = [_cell(feature, column, results.get(column, ""), notes) for column in COLUMNS]
    return f"| `{feature.name}` | {feature.about} | {' | '.join(cells)} |"


def _cell(feature: Feature, column: Column, result: str, notes: list[str]) -> str:
    cell = feature.cell(column)
    if cell is None:
        return "—"
    if cell.test:
        if cell.test not in notes:
            notes.append(cell.test)
        return f"{text_of(cell)} ({notes.index(cell.test) + 1})"
    if feature.need and result == feature.untried:
        return result if column == "train" else "not tried yet"
    if result == FAILED:
        return result
    if result != text_of(cell):
        raise ValueError(
            f"the matrix says {text_of(cell)!r} of {feature.name}-{column}, and the results "
            f"{result!r}: run make features ARGS=\"-k '{feature.name}'\""
        )
    return result


def text_of(cell: Cell) -> str:
    """What the page says of a cell whose test has passed."""
    if cell.outcome == "works":
        return "yes"
    return f"{cell.outcome}: {cell.words}".replace("|", "\\|")


def collected(report: Path) -> Iterator[tuple[str, str, str]]:
    """Row, column and result of each cell in a report of pytest."""
    for case in ElementTree.parse(report).iter("testcase"):
        said = {each.get("name"): each.get("value") or "" for each in case.iter("property")}
        if "row" not in said or "column" not in said:
            continue
        is_failed = case.find("failure") is not None or case.find("error") is not None
        yield said["row"], said["column"], FAILED if is_failed else said["result"]


def add(report: Path, results: dict[str, dict[str, str]]) -> None:
    """Take the results of a report."""
    run = (
        f"Run on {datetime.datetime.now(datetime.timezone.utc).date()}, with DeepSpeed "
        f"{deepspeed.__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"on {os.cpu_count()} CPU cores"
    )
    for row, column, result in collected(report):
        results.setdefault(row, {}).update({"run": run, column: result})


def main() -> None:
    """Take a report, and write the page."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for report in sys.argv[1:]:
        add(Path(report), results)
    kept = {
        feature.name: {
            key: results[feature.name][key]
            for key in ("run", *feature.own_columns)
            if key in results[feature.name]
        }
        for feature in FEATURES
        if feature.name in results and feature.own_columns
    }
    rows = (f"{json.dumps(name)}: {json.dumps(result)}" for name, result in kept.items())
    RESULTS.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    PAGE.write_text(page(FEATURES, kept))


if __name__ == "__main__":
    main()
