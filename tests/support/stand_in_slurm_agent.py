"""What an engine starts in tests instead of the agent: ``FILE [exit CODE]``.

It writes its process id, arguments, token and Slurm node to FILE. Then it exits, or ignores SIGTERM
and waits until it is killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    """Write what was given, then exit or wait."""
    path, *rest = sys.argv[1:]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    given = {
        "pid": os.getpid(),
        "arguments": rest,
        "token": sys.stdin.read(),
        "node": os.environ.get("SLURMD_NODENAME"),
        "cpus": os.environ.get("SLURM_CPUS_ON_NODE"),
        "gpus": os.environ.get("SLURM_GPUS_ON_NODE"),
        "folder": str(Path.cwd()),
    }
    Path(path).with_suffix(".part").write_text(json.dumps(given))
    Path(path).with_suffix(".part").rename(path)
    if rest[:1] == ["exit"]:
        print("these are the last words")
        sys.exit(int(rest[1]))
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
