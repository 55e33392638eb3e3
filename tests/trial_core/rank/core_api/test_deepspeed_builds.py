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
import importlib.util
import json
import os
import sys

from trial_core.rank.core_api.deepspeed_builds import builds_prepared

with builds_prepared(0):
    importlib.util.find_spec("deepspeed")  # transformers asks whether it is there
    import deepspeed
    import deepspeed.comm
assert not any(type(each).__name__ == "_AfterImport" for each in sys.meta_path)
print(json.dumps([os.environ["TORCH_EXTENSIONS_DIR"], deepspeed.ops.__compatible_ops__]))
"""


@pytest.mark.long
@pytest.mark.parametrize("is_first", [True, False])
def test_a_killed_build_does_not_block_a_script(tmp_path: Path, is_first: bool) -> None:
    """Its lock goes when the script imports DeepSpeed, before anything can wait for it; and a CPU
    rank does not compile what only DeepSpeed's inference calls. Also where it was imported before.
    """
    lock = tmp_path / "fused_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    long_ago = lock.stat().st_mtime - ABANDONED_SECONDS - 60
    for path in (lock, lock.parent):
        os.utime(path, (long_ago, long_ago))
    done = subprocess.run(
        [sys.executable, "-c", ("" if is_first else "import deepspeed\n") + SCRIPT],
        env={**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    folder, compatible = json.loads(done.stdout.splitlines()[-1])
    assert folder == str(tmp_path)
    assert not lock.exists()
    assert compatible[SHARED_MEMORY_OP] is False


def test_a_script_without_deepspeed_does_not_import_it() -> None:
    """It would take seconds."""
    source = SCRIPT.split("    import deepspeed\n")[0] + "assert 'deepspeed' not in sys.modules\n"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
