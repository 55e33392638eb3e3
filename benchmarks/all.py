"""Runs every benchmark, one after the other, and adds a dated line of each to a file that is kept.

The file is `benchmarks/history.jsonl`: date, commit, name, arguments, figures, targets, and whether
they hold. It shows a figure that grows from line to line, even while its target holds. After each
line the table of `docs/benchmarks.md` is written anew.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks import page
from benchmarks.page import HISTORY

ORDER = (
    "request", "workload", "loop", "start", "restart", "replace", "stopping", "checkpoint",
    "loading", "continuous", "report", "telemetry", "rebuild", "driver_memory", "scale",
    "pretrained", "search", "goodput",
)  # fmt: skip
"""All benchmarks but `gpu`, which needs a GPU. The short ones come first."""
GOODPUT = "--only trialflow --batches 1400 --batch-seconds 0.3 --save-every 15"
ARGUMENTS = {"goodput": GOODPUT.split()}
"""The arguments of the README's figure over 420 s. The other contestants take an hour, and do not
change with this code."""


def measured(name: str) -> dict[str, Any]:
    """Run a benchmark and show its output. Return its last line, or how it failed."""
    with subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.{name}", *ARGUMENTS.get(name, ())],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        last = ""
        for last in process.stdout or ():
            print(last, end="", flush=True)
    if process.returncode:
        return {"failed": f"exit code {process.returncode}"}
    found: dict[str, Any] = json.loads(last)
    return {key: found[key] for key in ("figures", "targets", "holds")}


def main() -> None:
    """Run the benchmarks. The exit code is 1 if one fails or misses a target."""
    parser = argparse.ArgumentParser(prog="benchmarks.all", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=ORDER, default=ORDER)
    parser.add_argument("--into", type=Path, default=HISTORY)
    arguments = parser.parse_args()
    git = ["git", "-C", str(HISTORY.parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    hold = True
    for name in arguments.only:
        print(f"benchmark {name}", flush=True)
        result = measured(name)
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        given = " ".join(ARGUMENTS.get(name, ()))
        line = {"date": now, "commit": commit, "name": name, "arguments": given, **result}
        with arguments.into.open("a") as file:
            file.write(f"{json.dumps(line)}\n")
        if arguments.into.samefile(HISTORY):
            page.write()
        hold = hold and result.get("holds", False)
    sys.exit(0 if hold else 1)


if __name__ == "__main__":
    main()
