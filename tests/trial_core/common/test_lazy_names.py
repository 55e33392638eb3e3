"""Names that are imported on first use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.snippets import ROOT

SCRIPT = """
import sys, threading
from trial_core.common import lazy_names

lazy_names.SAID_AFTER_SECONDS = 0.0
said = threading.Event()
write = sys.stderr.write
sys.stderr.write = lambda text: (write(text), said.set())
sys.modules["script"] = sys.modules["__main__"]
get, _ = lazy_names.lazy_names("package", ["name"], {"name": "slow"})
get("name")
"""
SLOW = "import os, script\nname = os.environ['RANK'] != '0' or script.said.wait(60)\n"


@pytest.mark.parametrize(("rank", "said"), [("0", "importing package"), ("1", "")])
def test_a_script_says_what_it_imports(tmp_path: Path, rank: str, said: str) -> None:
    """Once that takes long, and on rank 0 alone."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "slow.py").write_text(SLOW)
    done = subprocess.run(
        [sys.executable, tmp_path / "train.py"], capture_output=True, text=True, check=True,
        env={**os.environ, "RANK": rank, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stderr.startswith(said)
    assert bool(done.stderr) == bool(said)
