"""An agent that reads its token: ``stand_in_ray_agent FOLDER [CODE]``.

It writes what it got to a file of FOLDER. Then it says so and exits with CODE, or waits until it is
killed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

folder, *code = sys.argv[1:]
got = {
    "token": sys.stdin.read(),
    "pid": os.getpid(),
    "actor": os.getppid(),
    "command": Path("/proc/self/cmdline").read_text().split("\0"),
    "threads": os.environ.get("OMP_NUM_THREADS"),
    "raylet": os.environ.get("RAY_RAYLET_PID"),
}
path = Path(folder) / f"{os.getpid()}.json"
path.with_suffix(".part").write_text(json.dumps(got))
path.with_suffix(".part").rename(path)
print("the stand-in has its token", flush=True)
if code:
    sys.exit(int(code[0]))
time.sleep(3600)
