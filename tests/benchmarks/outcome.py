"""What a benchmark prints last."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def outcome_of(command: str) -> dict[str, Any]:
    """Run ``python -m benchmarks.COMMAND``; its figures, its targets, and whether they hold."""
    printed = subprocess.run(
        [sys.executable, "-m", *f"benchmarks.{command}".split()],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True,
    ).stdout  # fmt: skip
    outcome: dict[str, Any] = json.loads(printed.splitlines()[-1])
    assert outcome.keys() == {"figures", "targets", "holds"}
    return outcome
