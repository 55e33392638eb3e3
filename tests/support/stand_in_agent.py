"""What a node provider starts in tests instead of the agent: ``FILE [exit CODE]``.

It writes what it was given to FILE. Then it exits, or ignores SIGTERM and waits until it is killed.
It does not notice that its driver is gone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

VARIABLES = {
    "node": "SLURMD_NODENAME",
    "cpus": "SLURM_CPUS_ON_NODE",
    "gpus": "SLURM_GPUS_ON_NODE",
    "threads": "OMP_NUM_THREADS",
    "raylet": "RAY_RAYLET_PID",
}


def main() -> None:
    """Write what was given, then exit or wait."""
    path, *rest = sys.argv[1:]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    given = {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "arguments": rest,
        "command": Path("/proc/self/cmdline").read_text().split("\0"),
        "token": sys.stdin.read(),
        "folder": str(Path.cwd()),
        **{name: os.environ.get(variable) for name, variable in VARIABLES.items()},
    }
    Path(path).with_suffix(".part").write_text(json.dumps(given))
    Path(path).with_suffix(".part").rename(path)
    if rest[:1] == ["exit"]:
        print("these are the last words", flush=True)
        sys.exit(int(rest[1]))
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
