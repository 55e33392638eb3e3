"""Objects of all sizes on real ranks, and ranks that call different collectives."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slots

PROGRAM = """
import json, os, pickle, pytest, torch, torch.distributed as dist
from tests.support.devices import on_another_device
from trial_core.errors import SlotsError
from trial_core.rank.collectives.exchange import ROOM_BYTES, Exchange

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
exchange = Exchange("all", range(size), rank, 60)

# Pickled, a text of this length just fits into a frame.
fits = ROOM_BYTES - (len(pickle.dumps("a" * 1000)) - 1000)
sizes = [[0, 1, 2], [fits - 1, fits, fits + 1], [1, 3 * fits, 2], [9 * fits, 0, 5 * fits]]
results = {"lengths": []}
for lengths in sizes:
    own = "abc"[rank] * lengths[rank]
    expected = ["abc"[each] * length for each, length in enumerate(lengths)]
    gathered = exchange.gather("gather", own)
    results["lengths"].append([
        exchange.allgather("allgather", own) == expected,
        gathered == (expected if rank == 0 else None),
        exchange.broadcast("broadcast", own) == expected[0],
    ])

on_another_device(pytest.MonkeyPatch())
tensor = torch.tensor([rank])
results["tensors"] = [
    *exchange.allgather("allgather", tensor), *(exchange.gather("gather", tensor) or ()),
    exchange.broadcast("broadcast", tensor),
]
results["tensors"] = [each.item() for each in results["tensors"]]

try:
    (exchange.gather if rank == 1 else exchange.allgather)(["a", "b", "c"][rank], None)
except SlotsError as error:
    results["error"], results["message"] = type(error).__name__, str(error)
print(json.dumps(results), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """The outputs of three ranks."""
    return run_ranks(PROGRAM, 3)


def test_objects_of_every_size_arrive(results: list[dict[str, Any]]) -> None:
    """Objects smaller than a frame, as large, and larger on one rank only, arrive unchanged."""
    assert [rank["lengths"] for rank in results] == [[[True] * 3] * 4] * 3


def test_tensors_arrive_on_the_cpu(results: list[dict[str, Any]]) -> None:
    """Not on the device of the rank that sent them."""
    assert [rank["tensors"] for rank in results] == [[0, 1, 2, 0, 1, 2, 0], *[[0, 1, 2, 0]] * 2]


def test_a_mismatch_of_collectives_is_reported_at_once(results: list[dict[str, Any]]) -> None:
    """Before the deadline, every rank raises and says which rank called what."""
    for rank in range(3):
        others = [each for each in range(3) if each != rank]
        mismatch = "; ".join(f"rank {other} called {'abc'[other]} instead" for other in others)
        assert results[rank]["error"] == "SlotsError"  # not DeadlineExceeded
        assert (
            f"on rank {rank}: {mismatch}. Every rank must call the same" in results[rank]["message"]
        )
