"""Starts processes as ranks of torch.distributed, with the environment of torchrun."""

from __future__ import annotations

import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
VARIABLES = {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}

# Forks the ranks of one program after the other: importing torch takes seconds.
LAUNCHER = """
import importlib, json, os, sys, traceback
import torch.distributed

told = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # DeepSpeed's import prints
for line in sys.stdin:
    program, preload, base, ranks = json.loads(line)
    for module in preload:
        importlib.import_module(module)
    for environment, output, errors in ranks:
        if os.fork() == 0:
            os.environ.clear()
            os.environ.update({**base, **environment})
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for number, path in ((1, output), (2, errors)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
            try:
                exec(compile(program, "<rank>", "exec"), {"__name__": "__main__"})
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
    failed = [status for _ in ranks if (status := os.wait()[1])]
    print(f"failed: {failed}" if failed else "ended", file=told, flush=True)
"""


@functools.cache
def _launcher(preload: tuple[str, ...]) -> subprocess.Popen[str]:
    """The process that forks ranks with these modules, until this one ends."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", LAUNCHER],
        env={**os.environ, **VARIABLES}, cwd=ROOT,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def _launch(program: str, preload: tuple[str, ...], base: Any, ranks: Any, seconds: float) -> None:
    """Have ranks forked, and wait until they have ended."""
    launcher = _launcher(preload)
    assert launcher.stdin is not None
    assert launcher.stdout is not None
    try:
        launcher.stdin.write(json.dumps([program, preload, base, ranks]) + "\n")
        launcher.stdin.flush()
        readable, _, _ = select.select([launcher.stdout], [], [], seconds)
        assert readable, f"the ranks did not end within {seconds:g} s"
        told = launcher.stdout.readline()
        assert told == "ended\n", f"the launcher of the ranks said {told!r}"
    except BaseException:
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()
        _launcher.cache_clear()
        raise


def run_ranks(
    program: str,
    world_size: int,
    local_size: int | None = None,
    preload: Sequence[str] = (),
    seconds: float = 300,
    **environment: str,
) -> list[dict[str, Any]]:
    """Run a Python program on every rank; returns the last lines they print, parsed as JSON.

    Args:
        local_size: ranks per machine; less than `world_size` simulates several machines.
        preload: modules that are imported once for all ranks.
        seconds: how long they may run.
        environment: additional variables for every rank.
    """
    local_size = local_size or world_size
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    base = {
        **os.environ, **VARIABLES,
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
        _launch(program, tuple(preload), base, ranks, seconds)
        results = []
        for rank, (_, output, errors) in enumerate(ranks):
            lines = Path(output).read_text().strip().splitlines()
            assert lines, f"rank {rank} printed nothing:\n{Path(errors).read_text()}"
            try:
                results.append(json.loads(lines[-1]))
            except ValueError:
                raise AssertionError(f"rank {rank}:\n{Path(errors).read_text()}") from None
    return results
