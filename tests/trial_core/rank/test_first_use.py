"""What a fork server imports ahead."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from trial_core.rank import first_use
print([each for each in first_use.MODULES if each not in sys.modules])
"""


@pytest.mark.long
def test_every_module_is_found() -> None:
    """A release of torch or DeepSpeed that moves one would make each restart slower."""
    seen = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert seen.stdout.splitlines()[-1] == "[]"


@pytest.mark.long
def test_a_broken_package_ends_no_fork_server(tmp_path: Path) -> None:
    """As one of TensorBoard's is, whose protobuf is another; a rank may not need it."""
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "__init__.py").write_text("raise TypeError('descriptors')")
    seen = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert seen.stdout.splitlines()[-1] == "['torch.utils.tensorboard']"
