"""Writes the tables of `docs/benchmarks.md` and `docs/index.md` from the history's latest lines.

``python -m benchmarks.page`` puts each between two comments of its page; the rest of the pages is
written by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

HISTORY = Path(__file__).with_name("history.jsonl")
DOCS = Path(__file__).parents[1] / "docs"
BEGIN = "<!-- The table below is written by python -m benchmarks.page. -->"
END = "<!-- The table ends here. -->"
HEAD = """\
| benchmark | figure | value | target | holds | date | machine | command |
|---|---|---|---|---|---|---|---|
"""
Line = Mapping[str, Any]
_START = "relative to the time of the imports"
_DCP = "relative to torch DCP's `load`"
_BOTO3 = "relative to DeepSpeed's `load_checkpoint` and boto3"
_S3FS = "relative to s3fs"
ROWS: dict[str, dict[str, tuple[str, str]]] = {
    "loop": {
        r"ratio_small_(\w+)": ("a batch of a DeepSpeedTrial, relative to the bare loop", ""),
        r"trialflow_pytorch_small_(\w+)": (
            "a batch of a PyTorchTrial, relative to a bare PyTorch loop", "",
        ),
        r"fabric_pytorch_small_(\w+)": ("… of Lightning Fabric", ""),
        r"lightning_pytorch_small_(\w+)": ("… of Lightning's Trainer", ""),
        r"accelerate_pytorch_small_(\w+)": ("… of Accelerate", ""),
    },
    "request": {
        r"median_ms_(\w+)": ("an empty request to all ranks, median", "ms"),
        r"p95_ms_(\w+)": ("… 95th percentile", "ms"),
    },
    "workload": {r"mean_ms_(\w+)": ("a workload's cost besides training, mean", "ms")},
    "checkpoint": {
        "blocked_s": ("pause of training for a checkpoint", "s"),
        "blocked_ratio_deepspeed_boto3": (
            "… relative to DeepSpeed's `save_checkpoint` and boto3", "",
        ),
        "lazy_ratio": ("… with `snapshot: lazy`, relative to `eager`", ""),
        "lazy_ratio_deepspeed_boto3": ("… relative to `save_checkpoint` and boto3", ""),
        "blocked_ratio_slow_store": ("… on a slow store, relative to a fast one", ""),
        "blocked_s_torch_dcp_async": ("… of torch DCP's `async_save`", "s"),
        "state_mib": ("… the size of the checkpoint", "MiB"),
        "upload_processor_ratio": (f"an upload's processor time, {_S3FS}", ""),
        "upload_memory_ratio": (f"… its memory, {_S3FS}", ""),
        "restore_processor_ratio": (f"a restore's processor time, {_S3FS}", ""),
        "restore_memory_ratio": (f"… its memory, {_S3FS}", ""),
        "fetched_share": ("share of a ZeRO-3 checkpoint that one rank of 4 fetches", ""),
        "training_ratio": ("ten batches during an upload, relative to ten without", ""),
    },
    "loading": {
        "state_mib": ("state that is fetched, verified and restored", "MiB"),
        r"time_ratio_dcp_(\w+)": (f"… the time, {_DCP}", ""),
        r"processor_ratio_dcp_(\w+)": (f"… the processor time, {_DCP}", ""),
        r"time_ratio_deepspeed_(\w+)": (f"… the time, {_BOTO3}", ""),
        r"trialflow_memory_mib_(\w+)": ("… a rank's memory beyond its state", "MiB"),
    },
    "continuous": {
        "lost_batches_median": ("batches that a SIGKILL costs, median", ""),
        "overhead_percent": ("time that continuous checkpoints add to the loop", "%"),
        "stall_ms_median": ("… the pause of each", "ms"),
        "remote_overhead_percent": (
            "time that a checkpoint every ten batches adds, with the storage on another machine",
            "%",
        ),
    },
    "stopping": {
        "cancel_and_save_seconds": ("from Cancel to free accelerators, with a checkpoint", "s"),
        "cancel_with_nothing_to_save_seconds": ("… with nothing to save", "s"),
        "crash_to_training_seconds": ("from SIGKILL of a rank to training", "s"),
        "crash_to_training_besides_own_start_seconds": ("… less the model's own start", "s"),
        "driver_crash_to_training_seconds": ("from SIGKILL of the driver to training", "s"),
        "driver_crash_to_training_besides_own_start_seconds": (
            "… less the model's own start", "s",
        ),
    },
    "restart": {
        "restart_seconds_with_preload": ("from SIGKILL of a rank to the next batch", "s"),
        "ratio": ("… relative to `preload: false`", ""),
    },
    "replace": {
        "node_seconds_replaced": ("from SIGKILL of a node to the next batch, with a spare", "s"),
        "node_ratio": ("… relative to a group that is all new", ""),
        "rank_seconds_replaced": ("from SIGKILL of a rank to the next batch", "s"),
        "rank_ratio": ("… relative to a group that is all new", ""),
    },
    "goodput": {
        "seconds_trialflow": ("training without failures", "s"),
        "goodput_trialflow": ("… goodput with failures", ""),
        "lost_share_trialflow": ("… share of the time that is lost", ""),
        "hands_trialflow": ("… times that a person had to help", ""),
        "departed_trialflow": ("… runs whose weights differ from the undisturbed run's", ""),
        "processes_left_trialflow": ("… processes left", ""),
        "goodput_of_the_best_other": ("… goodput of the best other", ""),
        "every_seconds": ("one rank is killed again after", "s"),
        "every_ranks": ("… of so many ranks", ""),
        r"every_goodput_(\w+)": ("… share of the time that trains", ""),
        r"every_gap_seconds_(\w+)": ("… from SIGKILL to the next batch, median", "s"),
        r"every_counted_share_(\w+)": ("… share of the trained batches that count", ""),
        r"every_(hands|missing_batches|departed|processes_left)_trialflow": (
            "… times that a person had to help, batches that are lost, runs with other weights, "
            "processes left", "",
        ),
    },
    "start": {
        "alone_seconds": ("from `trialflow train` to the first batch, without a server", "s"),
        "alone_in_imports": (f"… {_START}", ""),
        "with_server_seconds": ("from `trialflow train` to the first batch, with a server", "s"),
        "with_server_in_imports": (f"… {_START}", ""),
    },
    "report": {r"ratio_(\d\w+)": ("a batch that is reported, relative to one that is not", "")},
    "telemetry": {r"ratio_(\d\w+)": ("a batch with OpenTelemetry, relative to one without", "")},
    "scale": {
        "ranks": ("simulated ranks", ""),
        "join_seconds": ("… until all their agents are ready", "s"),
        "request_ms_median": ("… a request to all of them, median", "ms"),
        "lost_node_named_ms": ("… from SIGKILL of an agent to the error that names it", "ms"),
    },
    "driver_memory": {
        r"rss_mib_at_(\d+)": ("resident memory of the driver after so many workloads", "MiB"),
        "growth_mib": ("… its growth", "MiB"),
    },
    "rebuild": {
        r"threads_growth_(\w+)": ("growth of a warm rank over many trials: threads", ""),
        r"descriptors_growth_(\w+)": ("… descriptors", ""),
        r"address_space_mib_growth_(\w+)": ("… address space", "MiB"),
        r"resident_mib_growth_(\w+)": ("… resident memory", "MiB"),
    },
    "pretrained": {"peak_share": ("most of the weights that a rank of 4 holds while it loads", "")},
    "search": {
        "until_found_to_tune": ("a search's batches until its best is found, of Ray Tune's", ""),
        "pasha_to_asha": ("… all batches of PASHA, of ASHA's", ""),
        "until_found_to_tune_digits": (
            "the same with curves of a digits classifier: until its best is found, of Ray Tune's",
            "",
        ),
        "pasha_to_asha_digits": ("… all batches of PASHA, of ASHA's", ""),
        "regret_asha_digits": ("… its best's loss at the end above the least one", ""),
        "regret_tune_digits": ("… of Ray Tune's best", ""),
        "beside_training_s": ("seconds of a trial of a search besides training", "s"),
        "beside_training_to_tune": ("… of Ray Tune's with new processes", ""),
    },
}  # fmt: skip
"""Figures that the page shows, in its order, with words and unit. Groups in a name tell apart the
cases that share a row. Other figures are shown if they have a target."""


FIRST = {
    "a batch of a PyTorchTrial, relative to a bare PyTorch loop": "",
    "pause of training for a checkpoint": "",
    "… of torch DCP's `async_save`": "",
    f"… the time, {_DCP}": f"fetch, verify and restore, from ranks to ranks, {_DCP}",
    "from Cancel to free accelerators, with a checkpoint": "",
    "from SIGKILL of a rank to training": "",
    "from SIGKILL of a node to the next batch, with a spare": "",
    "… goodput with failures": "share of the time that trains, with failures",
    "… times that a person had to help": "",
}
"""Rows that the site's first page shows, too, in its order; with other words if they need some."""


def latest(history: Iterable[Line]) -> dict[str, Line]:
    """Return the last line of each benchmark: first the benchmarks of `ROWS`, in their order.

    Lines of goodput with another number of ranks, or without ``--every``, measure something else;
    so does a line of continuous checkpoints for another machine's storage alone.
    """
    last = {_series(line): line for line in history}
    order = [*ROWS]

    def place(series: str) -> int:
        name = last[series]["name"]
        return order.index(name) if name in order else len(order)

    return {series: last[series] for series in sorted(last, key=place)}


def _series(line: Line) -> str:
    figures = line.get("figures", {})
    if "every_ranks" in figures:
        return f"{line['name']} --every, {figures['every_ranks']:g} ranks"
    is_remote = "remote_overhead_percent" in figures and "overhead_percent" not in figures
    return f"{line['name']}, remote" if is_remote else line["name"]


def table(history: Iterable[Line]) -> str:
    """Return the table of the latest figures."""
    rows = (row for line in latest(history).values() for row in _rows(line))
    return HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def first_table(history: Iterable[Line]) -> str:
    """Return the table of the site's first page.

    Raises:
        KeyError: the history lacks a figure of it.
    """
    rows = {row[1]: row for line in latest(history).values() for row in _rows(line)}
    shown = (f"| {words or key} | {' | '.join(rows[key][2:5])} |\n" for key, words in FIRST.items())
    return "| figure | measured | target | holds |\n|---|---|---|---|\n" + "".join(shown)


PAGES: dict[Path, Callable[[Iterable[Line]], str]] = {
    DOCS / "benchmarks.md": table,
    DOCS / "index.md": first_table,
}


def page(text: str, new: str) -> str:
    """Return the page's text with a new table.

    Raises:
        ValueError: the page lacks one of the comments around the table.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page lacks {BEGIN!r} or {END!r}")
    return f"{before}{BEGIN}\n\n{new}\n{END}{after}"


def read(path: Path = HISTORY) -> list[Line]:
    """Read the lines of a history, the oldest first."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write() -> None:
    """Write the pages."""
    for path, tabled in PAGES.items():
        path.write_text(page(path.read_text(), tabled(read())))


def _rows(line: Line) -> Iterator[list[str]]:
    """Yield a benchmark's rows; only the first one has date, machine and command."""
    name, figures, targets = line["name"], line.get("figures", {}), line.get("targets", {})
    arguments = line["arguments"]
    command = f'`make bench NAME={name} ARGS="{arguments}"`' if arguments else ""
    machine = f"{figures['cores']} CPU cores" if "cores" in figures else ""
    first, last = f"`{name}`", [line["date"][:10], machine, command or f"`make bench NAME={name}`"]
    if "failed" in line:
        yield [first, f"failed: {line['failed']}", "", "", "**no**", *last]
    shown: set[str] = set()
    for pattern, (words, unit) in ROWS.get(name, {}).items():
        cases = {each: found for each in figures if (found := re.fullmatch(pattern, each))}
        shown.update(cases)
        values = [_value(each, figures, unit, found) for each, found in cases.items()]
        if cases:
            most = {each: targets[each] for each in cases if each in targets}
            yield [first, words, "; ".join(values), *_judged(most, figures, unit), *last]
            first, last = "", ["", "", ""]
    for each in (figure for figure in targets if figure not in shown):
        judged = _judged({each: targets[each]}, figures, "")
        yield [first, f"`{each}`", _value(each, figures, ""), *judged, *last]
        first, last = "", ["", "", ""]


def _value(
    name: str, figures: Mapping[str, float], unit: str, found: re.Match[str] | None = None
) -> str:
    """Return a figure with unit and interval, after its case, from the groups of its name."""
    low, high = (re.sub("ratio|percent", rf"\g<0>_{end}", name) for end in ("low", "high"))
    text = f"{figures[name]:g}"
    if low != name and low in figures and high in figures:
        text += f" ({figures[low]:g}…{figures[high]:g})"
    text += f" {unit}" if unit else ""
    case = " ".join(found.groups()).replace("_", " ") if found else ""
    return f"{case}: {text}" if case else text


def _judged(targets: Mapping[str, float], figures: Mapping[str, float], unit: str) -> list[str]:
    """Return the targets of figures, and whether they hold; empty without targets."""
    if not targets:
        return ["", ""]
    most = dict.fromkeys(f"≤ {round(target, 4):g} {unit}".rstrip() for target in targets.values())
    hold = all(figures[name] <= target for name, target in targets.items())
    return [", ".join(most), "yes" if hold else "**no**"]


if __name__ == "__main__":
    write()
