"""Checks, in a process like a rank's, that ranks can use this machine's accelerators.

    python -m trial_core.deepspeed.accelerator_check COUNT

Prints two lines of JSON, each a text or null: why a rank cannot train on the last of COUNT
accelerators, and why DeepSpeed's operators cannot be compiled.
"""

from __future__ import annotations

import json
import sys

from trial_core.deepspeed.op_builds import nvcc_problem
from trial_core.errors import LaunchError
from trial_core.rank.collectives.accelerator import claim_accelerator


def main(count: int) -> None:
    try:
        claim_accelerator(count - 1)
        print("null")
    except LaunchError as error:
        print(json.dumps(str(error)))
    print(json.dumps(nvcc_problem()))


if __name__ == "__main__":
    main(int(sys.argv[1]))
