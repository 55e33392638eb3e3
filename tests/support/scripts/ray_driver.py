"""A Ray driver: ``ray_driver.py ADDRESS FOLDER [insecure]`` starts stand-in agents, and waits."""

from __future__ import annotations

import sys
import time

from trial_core.nodes.engine import NodeRequest
from trial_core.nodes.ray_engine import RayEngine

address, folder, *insecure = sys.argv[1:]
engine = RayEngine(address, bool(insecure), "tests.support.stand_in_ray_agent")
gang = engine.place(NodeRequest(slots=4), 120, lambda: False)
for node in gang.nodes:
    gang.start(node, [folder], "a token")
print("started", flush=True)
time.sleep(3600)
