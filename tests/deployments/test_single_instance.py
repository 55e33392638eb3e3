"""One `trialflow up` of a PREFECT_HOME at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trial_core.errors import ConfigError
from trialflow.deployments.single_instance import single_instance

HOLD = """
import pathlib, sys
from trialflow.deployments.single_instance import single_instance
with single_instance(pathlib.Path(sys.argv[1])) as say:
    say("http://127.0.0.1:4200/api")
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_second_is_told_of_the_first_which_killed_is_gone(tmp_path: Path) -> None:
    """Who it is, where, and what to do; SIGKILL leaves nothing that would keep others away."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as first:  # fmt: skip
        assert first.stdout is not None
        first.stdout.readline()
        for _ in range(2):
            with pytest.raises(ConfigError) as refused, single_instance(tmp_path):
                pass
            said = f"{tmp_path}: process {first.pid}, at http://127.0.0.1:4200/api. Use that one"
            assert said in str(refused.value)
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
    with single_instance(tmp_path), single_instance(tmp_path / "another"):
        pass
