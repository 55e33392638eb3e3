"""Starts plain processes as ranks of torch.distributed, like torchrun or deepspeed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 120


def run_ranks(
    program: str, world_size: int, local_size: int | None = None, **environment: str
) -> list[dict[str, Any]]:
    """Run a Python program on every rank; returns the last lines they print, parsed as JSON.

    Args:
        local_size: ranks per machine; less than `world_size` simulates several machines.
        environment: additional variables for every rank.
    """
    local_size = local_size or world_size
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    base = {
        **os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_size), **environment,
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", program],
            env={
                **base,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % local_size),
                "GROUP_RANK": str(rank // local_size),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [process.communicate(timeout=TIMEOUT_SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    results = []
    for rank, (output, errors) in enumerate(outputs):
        lines = output.strip().splitlines()
        assert lines, f"rank {rank} printed nothing:\n{errors}"
        results.append(json.loads(lines[-1]))
    return results
