from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.s3 import CEPH_SCRIPT

STARTER = """
import signal
from tests.support.s3 import ceph_gateway
with ceph_gateway() as server:
    print(server.endpoint_url, flush=True)
    signal.pause()
"""


def daemons_of(port: str) -> list[int]:
    """The process ids of the gateway on a port and of its daemons."""
    found = []
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = cmdline.read_bytes().decode().split("\0")
            config = next(Path(word) for word in words if word.endswith("/ceph.conf"))
            if f"127.0.0.1:{port}\n" in config.read_text():
                found.append(int(cmdline.parent.name))
        except (OSError, StopIteration):
            continue  # it has ended, or is not one of Ceph's
    return found


@pytest.mark.gateway
@pytest.mark.long
def test_a_killed_test_session_leaves_no_gateway() -> None:
    """SIGKILL of the process that started a gateway ends all its daemons."""
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER],
        cwd=CEPH_SCRIPT.parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert starter.stdout is not None
    port = starter.stdout.readline().rpartition(":")[2].strip()
    handles = [os.pidfd_open(pid) for pid in daemons_of(port)]
    starter.send_signal(signal.SIGKILL)
    starter.communicate()
    try:
        assert len(handles) == 3
        for handle in handles:
            assert select.select([handle], [], [], 30)[0], "a daemon still runs after 30 s"
    finally:
        for handle in handles:
            os.close(handle)
