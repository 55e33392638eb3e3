"""What a fork server imports ahead."""

from __future__ import annotations

import subprocess
import sys

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
