"""Stands in for Prefect's engine: says its process id, and each SIGTERM, and does not end."""

from __future__ import annotations

import os
import signal

signal.signal(signal.SIGTERM, lambda number, frame: print("asked", flush=True))
print(os.getpid(), flush=True)
while True:
    signal.pause()
