"""One `trialflow up` per PREFECT_HOME at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trial_core.errors import ConfigError
from trialflow.flows.server.single_instance import address_of_running, single_instance

HOLD = """
import pathlib, sys
from trialflow.flows.server.single_instance import single_instance
with single_instance(pathlib.Path(sys.argv[1])) as store_address:
    store_address("http://127.0.0.1:4200/api")
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_instance_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    """The error names the first one's process and address, and other commands find the address.
    SIGKILL releases the lock."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as first:  # fmt: skip
        assert first.stdout is not None
        first.stdout.readline()
        for _ in range(2):
            with pytest.raises(ConfigError) as refused, single_instance(tmp_path):
                pass
            holder = f"{tmp_path}: process {first.pid}, at http://127.0.0.1:4200/api. Use that"
            assert holder in str(refused.value)
            assert address_of_running(tmp_path) == "http://127.0.0.1:4200/api"
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
    assert address_of_running(tmp_path) is None
    assert address_of_running(tmp_path / "another") is None
    with single_instance(tmp_path), single_instance(tmp_path / "another"):
        pass
