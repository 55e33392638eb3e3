"""A script that imports DeepSpeed by itself builds its extensions as a trial does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trial_core.deepspeed.op_builds import ABANDONED_SECONDS, SHARED_MEMORY_OP

SCRIPT = """
import json
import os

import deepspeed
import deepspeed.comm
from torch.utils.file_baton import FileBaton

folder = os.environ["TORCH_EXTENSIONS_DIR"]
builds = FileBaton(f"{folder}/fused_adam/lock").try_acquire()
print(json.dumps([folder, builds, deepspeed.ops.__compatible_ops__]))
"""

IN_A_SLOT = """
from types import SimpleNamespace

from trial_core.rank.core_api.script_controller import run_in_slot
from trial_core.schedule.command import ScriptCommand

run_in_slot(ScriptCommand("train.py", False, ()), SimpleNamespace())
"""


@pytest.mark.long
def test_a_killed_build_does_not_block_a_script(tmp_path: Path) -> None:
    """It takes the lock over; and a CPU rank does not compile what only DeepSpeed's inference
    calls."""
    (tmp_path / "train.py").write_text(SCRIPT)
    lock = tmp_path / "fused_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    long_ago = lock.stat().st_mtime - ABANDONED_SECONDS - 60
    for path in (lock, lock.parent):
        os.utime(path, (long_ago, long_ago))
    done = subprocess.run(
        [sys.executable, "-c", IN_A_SLOT],
        env={**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)},
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    folder, builds, compatible = json.loads(done.stdout.splitlines()[-1])
    assert folder == str(tmp_path)
    assert builds is True
    assert compatible[SHARED_MEMORY_OP] is False
