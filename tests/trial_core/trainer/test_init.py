"""`init` in a script, without a fit."""

from __future__ import annotations

import pytest

from tests.support.ranks import run_ranks

BLOCKS = """
import json
import psutil
from trial_core.deepspeed import init

threads = []
for block in range(3):
    with init() as context:
        context.distributed.allgather(block)
        threads.append(psutil.Process().num_threads())
print(json.dumps({"threads": threads}))
"""


@pytest.mark.long
@pytest.mark.slots
def test_later_blocks_use_the_groups_of_the_first() -> None:
    """Process groups of every block's own would add up: each has threads."""
    for outcome in run_ranks(BLOCKS, 2):
        assert len(set(outcome["threads"])) == 1, outcome
