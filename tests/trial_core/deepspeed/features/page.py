"""Writes the page of DeepSpeed's features from the results of their tests.

``python -m tests.trial_core.deepspeed.features.page REPORT.xml`` takes the report of pytest
(``--junitxml``) into ``results.json``, or ``results_gpu.json`` if it is of a machine with GPUs, and
writes the page. Rows that were not run keep their results.
"""

from __future__ import annotations

import datetime
import functools
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

from tests.trial_core.deepspeed.features.feature import COLUMNS, UNTRIED, Cell, Column, Feature
from tests.trial_core.deepspeed.features.matrix import FEATURES
from trial_core.processes.machine.accelerators import described, visible_accelerators

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "docs" / "reference" / "deepspeed-features.md"
RESULTS = {
    "cpu": Path(__file__).with_name("results.json"),
    "gpu": Path(__file__).with_name("results_gpu.json"),
}
Results = dict[str, dict[str, str]]
FAILED = "**not what the matrix says**"
HEAD = Path(__file__).with_name("page_head.md").read_text()


def page(features: Sequence[Feature], results: Results, on_gpus: Results) -> str:
    """The page.

    Args:
        on_gpus: the results on GPUs; of some features, or of all.

    Raises:
        ValueError: the results are not those of these features.
    """
    tried = {feature.name for feature in features if feature.own_columns}
    if odd := sorted(results.keys() ^ tried):
        raise ValueError(f"only one of results and matrix has {odd}: run `make features`")
    runs = sorted({each["run"] for each in results.values()})
    runs += sorted({f"Column GPU: {each['run']}" for each in on_gpus.values()})
    notes: list[str] = []
    parts = [HEAD.replace("{run}", "; ".join(runs) + ".")]
    for heading, rows in groupby(features, key=lambda feature: feature.heading):
        parts.append(
            f"\n## {heading}\n\n| row | what | {' | '.join(COLUMNS)} | GPU |\n|{'---|' * 8}"
        )
        for feature in rows:
            gpu = _on_gpus(feature.on_gpus(), on_gpus.get(feature.name, {}))
            parts.append(f"\n{_row(feature, results.get(feature.name, {}), notes)} {gpu} |")
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
    if result.endswith(UNTRIED):
        return result if column == "train" else UNTRIED
    if result == FAILED:
        return result
    if result != text_of(cell):
        raise ValueError(
            f"the matrix says {text_of(cell)!r} of {feature.name}-{column}, and the results "
            f"{result!r}: run make features ARGS=\"-k '{feature.name}'\""
        )
    return result


def _on_gpus(feature: Feature, results: Mapping[str, str]) -> str:
    """The results on GPUs in a few words: all columns work; or the first that does not."""
    columns = [column for column in feature.own_columns if column != "ranks"]
    if not columns:
        return "—"
    if not results:
        return feature.lacks("train", 1) or UNTRIED
    seen = {column: _cell(feature, column, results.get(column, UNTRIED), []) for column in columns}
    odd = [column for column in columns if seen[column] != "yes"]
    if not odd:
        return "yes"
    return seen[odd[0]] if odd[0] == "train" else f"{odd[0]}: {seen[odd[0]]}"


def text_of(cell: Cell) -> str:
    """What the page says of a cell whose test has passed."""
    if cell.outcome == "works":
        return "yes"
    return f"{cell.outcome}: {cell.words}".replace("|", "\\|")


@functools.cache
def this_machine() -> str:
    """When, with which versions and on which devices tests run, for people."""
    devices = f"{os.cpu_count()} CPU cores"
    if (gpus := visible_accelerators(os.environ)).devices:
        devices = described(gpus)
    return (
        f"Run on {datetime.datetime.now(datetime.timezone.utc).date()}, with DeepSpeed "
        f"{deepspeed.__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"on {devices}"
    )


def collected(report: Path) -> Iterator[dict[str, str]]:
    """The properties of each cell in a report of pytest."""
    for case in ElementTree.parse(report).iter("testcase"):
        said = {each.get("name"): each.get("value") or "" for each in case.iter("property")}
        if "row" not in said or "column" not in said:
            continue
        is_failed = case.find("failure") is not None or case.find("error") is not None
        yield {**said, **({"result": FAILED} if is_failed else {})}


def add(report: Path, results: Mapping[str, Results]) -> None:
    """Take the results of a report into those of its device."""
    for each in collected(report):
        row = results[each["device"]].setdefault(each["row"], {})
        row.update({"run": each["run"], each["column"]: each["result"]})
        if each["device"] == "gpu":
            row["feature"] = each["feature"]


def main() -> None:
    """Take a report, and write the page."""
    results = {
        device: json.loads(path.read_text()) if path.exists() else {}
        for device, path in RESULTS.items()
    }
    for report in sys.argv[1:]:
        add(Path(report), results)
    kept = {device: _of_the_matrix(device, each) for device, each in results.items()}
    text = page(FEATURES, kept["cpu"], kept["gpu"])
    for device, path in RESULTS.items():
        rows = (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in kept[device].items())
        path.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    PAGE.write_text(text)


def _of_the_matrix(device: str, results: Results) -> Results:
    """The results of the features and columns that there are, in their order.

    On GPUs, which few machines have, a feature that has changed since loses its results.
    """
    features = [each.on_gpus() if device == "gpu" else each for each in FEATURES]
    return {
        feature.name: {
            key: results[feature.name][key]
            for key in ("run", "feature", *feature.own_columns)
            if key in results[feature.name]
        }
        for feature in features
        if feature.name in results
        and feature.own_columns
        and (device == "cpu" or results[feature.name].get("feature") == feature.digest)
    }


if __name__ == "__main__":
    main()
