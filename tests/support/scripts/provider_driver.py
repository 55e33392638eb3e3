"""The driver of a run: ``provider_driver.py FOLDER [ADDRESS [insecure]]``, and waits.

It starts stand-ins for agents on two nodes, of the Ray cluster at ADDRESS, else of this allocation.
Each writes to a file of FOLDER.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from trial_core.processes.nodes.node_provider import NodeProvider, NodeRequest
from trial_core.processes.nodes.ray_provider import RayProvider
from trial_core.processes.nodes.slurm_provider import SlurmProvider

STAND_IN = ("-m", "tests.support.stand_in_agent")

folder, *ray = sys.argv[1:]
provider: NodeProvider = SlurmProvider()
if ray:
    provider = RayProvider(ray[0], bool(ray[1:]))
gang = provider.acquire(NodeRequest(4, 4, on_cpu=True), 120, lambda: False)
for number, node in enumerate(gang.nodes):
    gang.start(node, [*STAND_IN, str(Path(folder) / f"agent-{number}")], "a token")
time.sleep(3600)
