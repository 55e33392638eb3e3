"""What a request costs that asks nothing: Ping, from the driver to warm ranks and back.

Warm ranks have a trial and its loaders, as in the middle of a run. Requests come with pauses
between them: in a run too, ranks and driver have done something else since the last one.
"""

from __future__ import annotations

import argparse
import time

from benchmarks.figures import conclude, percentile
from benchmarks.ranks import built, case_name, launched
from trial_core.messages import Done, Ping
from trial_core.slots.group import SlotGroup

TARGET_MS = 5.0
WARM_UP_REQUESTS = 50
PAUSE_SECONDS = 0.002


def measure(slots: SlotGroup, requests: int) -> list[float]:
    """Seconds from sending a Ping to having all ranks' answers, for that many."""
    taken = []
    with built(slots, "tiny", bare_batches=1):
        for _ in range(WARM_UP_REQUESTS + requests):
            time.sleep(PAUSE_SECONDS)
            began = time.perf_counter()
            slots.request(Ping(), Done)
            taken.append(time.perf_counter() - began)
    return taken[WARM_UP_REQUESTS:]


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
            taken = [seconds * 1e3 for seconds in measure(slots, arguments.requests)]
        median, p95 = percentile(taken, 50), percentile(taken, 95)
        print(f"{case_name(world_size)}: median {median:.3f} ms, p95 {p95:.3f} ms", flush=True)
        for name, value in (("median", median), ("p95", p95)):
            figures[f"{name}_ms_{case_name(world_size)}"] = value
            targets[f"{name}_ms_{case_name(world_size)}"] = TARGET_MS
    conclude(figures, targets)


if __name__ == "__main__":
    main()
