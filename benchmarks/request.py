"""Measures the round trip of an empty request: Ping, from the driver to warm ranks and back.

The ranks have a trial and its loaders, as in the middle of a run. A pause precedes each request,
because in a run too driver and ranks do other work between requests.
"""

from __future__ import annotations

import argparse
import time

from benchmarks.figures import conclude, percentile
from benchmarks.ranks import built, case_name, launched
from trial_core.messages import Done, Ping
from trial_core.processes.slots.slot_group import SlotGroup

TARGET_MS = 5.0
WARM_UP_REQUESTS = 50
PAUSE_SECONDS = 0.002


def measure(slots: SlotGroup, requests: int) -> list[float]:
    """Return, for each request, the seconds from sending a Ping to the last rank's answer."""
    durations = []
    with built(slots, "LoopTrial", {"model": "tiny", "bare_batches": 1}):
        for _ in range(WARM_UP_REQUESTS + requests):
            time.sleep(PAUSE_SECONDS)
            began = time.perf_counter()
            slots.request(Ping(), Done)
            durations.append(time.perf_counter() - began)
    return durations[WARM_UP_REQUESTS:]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="benchmarks.request", description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    targets: dict[str, float] = {}
    for world_size in arguments.ranks:
        with launched(world_size) as slots:
            durations_ms = [s * 1e3 for s in measure(slots, arguments.requests)]
        median, p95 = percentile(durations_ms, 50), percentile(durations_ms, 95)
        print(f"{case_name(world_size)}: median {median:.3f} ms, p95 {p95:.3f} ms", flush=True)
        for name, value in (("median", median), ("p95", p95)):
            figures[f"{name}_ms_{case_name(world_size)}"] = value
            targets[f"{name}_ms_{case_name(world_size)}"] = TARGET_MS
    conclude(figures, targets)


if __name__ == "__main__":
    main()
