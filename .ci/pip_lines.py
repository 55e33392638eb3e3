"""Shows what pip does in few lines: large downloads, and a bar while it unpacks.

Run with the environment's python, pip's output on stdin. The bar is pip's own copy of rich.
"""

from __future__ import annotations

import re
import sys
import sysconfig
import threading
from pathlib import Path

from pip._vendor.rich.console import Console
from pip._vendor.rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

LOOK_SECONDS = 0.5
REPORT_SECONDS = 15
DOWNLOADING = re.compile(r" *Downloading (?:.*/)?([^/ ]+) (\([0-9.]+ MB\))")
UNPACKING = re.compile(r"Installing collected packages: (.*)")


def installed() -> int:
    """How many packages are in the environment: pip writes their metadata after their files."""
    return len(list(Path(sysconfig.get_path("purelib")).glob("*.dist-info/RECORD")))


def show_unpacking(total: int, is_over: threading.Event) -> None:
    """A bar on a terminal; elsewhere a line now and then."""
    before, console = installed(), Console()
    columns = [TextColumn("  unpacking packages"), BarColumn(), MofNCompleteColumn()]
    is_log = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=is_log) as progress:
        task, looks = progress.add_task("", total=total), 0
        while not is_over.wait(LOOK_SECONDS):
            done, looks = min(total, installed() - before), looks + 1
            progress.update(task, completed=done)
            if is_log and looks % (REPORT_SECONDS / LOOK_SECONDS) == 0:
                print(f"  unpacked {done} of {total} packages", flush=True)


def main() -> None:
    is_over, thread = threading.Event(), None
    for line in sys.stdin:
        if line.startswith("Successfully installed"):
            is_over.set()  # before the line: it would be drawn over the bar
            if thread is not None:
                thread.join()
            print("  installed", flush=True)
        elif found := DOWNLOADING.match(line):
            print("  downloading", *found.groups(), flush=True)
        elif found := UNPACKING.match(line):
            total = len(found[1].split(","))
            print(f"  unpacking {total} packages", flush=True)
            thread = threading.Thread(target=show_unpacking, args=(total, is_over))
            thread.start()
    is_over.set()


if __name__ == "__main__":
    main()
