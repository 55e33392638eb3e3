"""Starts processes as ranks of torch.distributed, with the environment of torchrun."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 300

# Forks all ranks after one import of torch, which takes seconds.
LAUNCHER = """
import importlib, json, os, sys, traceback
import torch.distributed

program, preload, ranks = json.load(sys.stdin)
for module in preload:
    importlib.import_module(module)
for environment, output, errors in ranks:
    if os.fork() == 0:
        os.environ.update(environment)
        for number, path in ((1, output), (2, errors)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
        try:
            exec(compile(program, "<rank>", "exec"), {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
for _ in ranks:
    os.wait()
"""


def run_ranks(
    program: str,
    world_size: int,
    local_size: int | None = None,
    preload: Sequence[str] = (),
    **environment: str,
) -> list[dict[str, Any]]:
    """Run a Python program on every rank; returns the last lines they print, parsed as JSON.

    Args:
        local_size: ranks per machine; less than `world_size` simulates several machines.
        preload: modules that are imported once for all ranks.
        environment: additional variables for every rank.
    """
    local_size = local_size or world_size
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    base = {
        **os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_size), "CROSS_SIZE": str(world_size // local_size),
        **environment,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            (
                {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank % local_size),
                    "GROUP_RANK": str(rank // local_size),
                    "CROSS_RANK": str(rank // local_size),
                },
                f"{folder}/{rank}.out",
                f"{folder}/{rank}.err",
            )
            for rank in range(world_size)
        ]
        with subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", LAUNCHER],
            env=base, stdin=subprocess.PIPE, text=True, start_new_session=True,
        ) as launcher:  # fmt: skip
            try:
                launcher.communicate(json.dumps([program, preload, ranks]), timeout=TIMEOUT_SECONDS)
            except BaseException:
                os.killpg(launcher.pid, signal.SIGKILL)
                raise
        results = []
        for rank, (_, output, errors) in enumerate(ranks):
            lines = Path(output).read_text().strip().splitlines()
            assert lines, f"rank {rank} printed nothing:\n{Path(errors).read_text()}"
            try:
                results.append(json.loads(lines[-1]))
            except ValueError:
                raise AssertionError(f"rank {rank}:\n{Path(errors).read_text()}") from None
    return results
