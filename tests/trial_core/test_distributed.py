"""`DistributedContext` on real ranks: collectives, machines, deadlines, and how it is built."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from trial_core.distributed import DistributedContext
from trial_core.errors import TrialError

LAUNCHER_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "GROUP_RANK",
    "CROSS_RANK", "CROSS_SIZE",
)  # fmt: skip

EVERY_COLLECTIVE = """
import json, torch.distributed as dist
from trial_core.distributed import DistributedContext

d = DistributedContext.from_torch_distributed()
if d.size > 1:
    dist.init_process_group("gloo")
stuff = {"rank": d.rank}
print(json.dumps({
    "who": [d.get_rank(), d.get_size(), d.get_local_rank(), d.get_num_agents()],
    "attributes": [d.rank, d.size, d.local_rank, d.local_size, d.cross_rank, d.cross_size],
    "allgather": d.allgather(stuff),
    "gather": d.gather(stuff),
    "broadcast": d.broadcast(stuff),
    "allgather_local": d.allgather_local(stuff),
    "gather_local": d.gather_local(stuff),
    "broadcast_local": d.broadcast_local(stuff),
}))
"""

BAD_COMPANY = """
import json, os, time, torch.distributed as dist
from trial_core.distributed import DistributedContext
from trial_core.errors import SlotsError

d = DistributedContext.from_torch_distributed()
dist.init_process_group("gloo")
d.allgather("so far so good")
began = time.monotonic()
said = {"error": None}
try:
    WHAT_HAPPENS
except SlotsError as error:
    said = {"error": type(error).__name__, "message": str(error)}
said["seconds"] = time.monotonic() - began
print(json.dumps(said), flush=True)
# A rank that leaves would be noticed at once: all stay until all have noticed by the deadline.
store = dist.distributed_c10d._get_default_store()
store.set(f"over {d.rank}", "")
store.wait([f"over {rank}" for rank in range(d.size)])
os._exit(0)
"""


def of(*ranks: int) -> list[dict[str, int]]:
    return [{"rank": rank} for rank in ranks]


@pytest.mark.slots
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_collectives_on_one_machine(world_size: int) -> None:
    """Every rank gets everybody's, only the chief gathers, and a machine is all there is."""
    everybody = of(*range(world_size))
    for rank, said in enumerate(run_ranks(EVERY_COLLECTIVE, world_size)):
        assert said["who"] == [rank, world_size, rank, 1]
        assert said["attributes"] == [rank, world_size, rank, world_size, 0, 1]
        assert said["allgather"] == said["allgather_local"] == everybody
        expected = everybody if rank == 0 else None
        assert said["gather"] == said["gather_local"] == expected
        assert said["broadcast"] == said["broadcast_local"] == {"rank": 0}


@pytest.mark.slots
def test_collectives_on_two_machines() -> None:
    """Two machines of two ranks: local forms stay on the machine, with its first rank as chief."""
    for rank, said in enumerate(run_ranks(EVERY_COLLECTIVE, 4, local_size=2)):
        first = rank // 2 * 2
        assert said["who"] == [rank, 4, rank % 2, 2]
        assert said["attributes"] == [rank, 4, rank % 2, 2, rank // 2, 2]
        assert said["allgather"] == of(0, 1, 2, 3)
        assert said["allgather_local"] == of(first, first + 1)
        assert said["gather"] == (of(0, 1, 2, 3) if rank == 0 else None)
        assert said["gather_local"] == (of(first, first + 1) if rank % 2 == 0 else None)
        assert said["broadcast"] == {"rank": 0}
        assert said["broadcast_local"] == {"rank": first}


@pytest.mark.slots
def test_two_machines_of_one_rank_need_no_one_for_local_collectives() -> None:
    """Alone on its machine, a rank's local collectives are its own."""
    for rank, said in enumerate(run_ranks(EVERY_COLLECTIVE, 2, local_size=1)):
        assert said["allgather_local"] == said["gather_local"] == of(rank)
        assert said["broadcast_local"] == {"rank": rank}
        assert said["allgather"] == of(0, 1)


def bad_company(what_happens: str, world_size: int) -> list[dict[str, Any]]:
    program = BAD_COMPANY.replace("WHAT_HAPPENS", what_happens)
    return run_ranks(program, world_size, TRIALFLOW_COLLECTIVE_SECONDS="3")


@pytest.mark.slots
def test_a_rank_that_never_comes_is_named_within_the_deadline() -> None:
    """Rank 2 of 4 stays away: the others raise, say what they waited for, and for whom."""
    said = bad_company("d.rank == 2 or d.allgather(d.rank)", 4)
    assert said[2]["error"] is None
    for rank in (0, 1, 3):
        assert said[rank]["message"].startswith(
            f"context.distributed.allgather (all) on rank {rank}"
        )
        assert "rank 2 did not come" in said[rank]["message"]
        assert said[rank]["seconds"] < 10
    waited = next(each for each in said if each["error"] == "DeadlineExceeded")
    assert "waited 3 s: rank 2 did not come. Every rank must call it" in waited["message"]
    assert "TRIALFLOW_COLLECTIVE_SECONDS" in waited["message"]


@pytest.mark.slots
def test_a_rank_that_never_connects_is_named_too() -> None:
    """The same when the groups are being set up."""
    setup = "d = DistributedContext.from_torch_distributed(); d.rank == 1 or d.connect()"
    said = bad_company(setup, 2)
    assert said[0]["error"] == "DeadlineExceeded"
    assert "context.distributed.connect (all) on rank 0 waited 3 s" in said[0]["message"]
    assert "rank 1 did not come" in said[0]["message"]


@pytest.mark.slots
def test_a_rank_that_calls_something_else_is_named() -> None:
    """Rank 1 waits for a broadcast while rank 0 gathers from it: each says what the other does."""
    said = bad_company("d.gather(0) if d.rank == 0 else d.allgather(0)", 2)
    assert "rank 1 called allgather instead" in said[0]["message"]


@pytest.mark.slots
def test_a_rank_that_is_lost_is_noticed_before_the_deadline() -> None:
    """Rank 0 ends, and the ranks' meeting point with it."""
    leave = "(print('{}', flush=True), os._exit(0)) if d.rank == 0 else d.allgather(0)"
    said = bad_company(leave, 2)
    assert said[1]["error"] == "SlotsError"
    assert said[1]["seconds"] < 2.5
    message = "context.distributed.allgather (all) on rank 1 failed after "
    assert said[1]["message"].startswith(message)


def built(monkeypatch: pytest.MonkeyPatch, how: str, **variables: str) -> DistributedContext:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    context: DistributedContext = getattr(DistributedContext, how)(chief_ip="10.0.0.1")
    return context


def test_from_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of torchrun."""
    context = built(
        monkeypatch, "from_torch_distributed", RANK="5", WORLD_SIZE="6", LOCAL_RANK="2",
        LOCAL_WORLD_SIZE="3", GROUP_RANK="1",
    )  # fmt: skip
    assert (context.rank, context.size) == (5, 6)
    assert (context.local_rank, context.local_size) == (2, 3)
    assert (context.cross_rank, context.cross_size) == (1, 2)
    assert context.chief_ip == "10.0.0.1"


def test_from_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of DeepSpeed's launcher."""
    context = built(
        monkeypatch, "from_deepspeed", RANK="4", WORLD_SIZE="6", LOCAL_RANK="1",
        LOCAL_SIZE="3", CROSS_RANK="1", CROSS_SIZE="2",
    )  # fmt: skip
    assert (context.rank, context.size) == (4, 6)
    assert (context.local_rank, context.local_size) == (1, 3)
    assert (context.cross_rank, context.cross_size) == (1, 2)


def test_from_environment_without_a_launcher_is_a_single_rank() -> None:
    """Plain python is one rank, whose collectives need nobody."""
    context = DistributedContext.from_environment({})
    assert (context.get_rank(), context.get_size(), context.get_num_agents()) == (0, 1, 1)
    assert context.allgather(7) == context.gather_local(7) == [7]


@pytest.mark.parametrize(
    ("how", "variables", "message"),
    [
        (
            "from_torch_distributed",
            {},
            "from_torch_distributed: RANK is not set in the environment; it is set where "
            "`torchrun` starts the script",
        ),
        (
            "from_deepspeed",
            {"RANK": "0", "WORLD_SIZE": "2"},
            "from_deepspeed: LOCAL_RANK is not set in the environment; it is set where "
            "`deepspeed` starts the script",
        ),
        (
            "from_deepspeed",
            {"RANK": "zero", "WORLD_SIZE": "2"},
            "RANK in the environment must be a number, got 'zero'",
        ),
        (
            "from_torch_distributed",
            {"RANK": "3", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
            "rank must be 0 or more and less than size, got 3 of 2",
        ),
    ],
)
def test_an_environment_that_no_launcher_made(
    monkeypatch: pytest.MonkeyPatch, how: str, variables: dict[str, str], message: str
) -> None:
    """The message names the variable and who would set it."""
    with pytest.raises(TrialError, match=re.escape(message)):
        built(monkeypatch, how, **variables)


def test_from_horovod_says_what_to_use_instead() -> None:
    """Horovod's day is over."""
    message = "Horovod is not supported, it has had no release since 2023; start the ranks with"
    with pytest.raises(TrialError, match=message):
        DistributedContext.from_horovod(object())


def test_a_collective_before_torch_distributed() -> None:
    """Says what to call first."""
    context = DistributedContext(
        rank=0, size=2, local_rank=0, local_size=2, cross_rank=0, cross_size=1
    )
    with pytest.raises(TrialError, match=r"call deepspeed\.init_distributed\(\) first"):
        context.allgather(1)


@pytest.mark.parametrize("seconds", ["soon", "0", "-1", "inf"])
def test_a_deadline_must_be_a_positive_number(
    monkeypatch: pytest.MonkeyPatch, seconds: str
) -> None:
    """Waiting for ever is not on offer."""
    monkeypatch.setenv("TRIALFLOW_COLLECTIVE_SECONDS", seconds)
    with pytest.raises(TrialError, match=rf"positive number of seconds, got '{seconds}'"):
        DistributedContext.from_environment({})


DISAGREEMENT = """
import json, os, torch.distributed as dist
from trial_core.distributed import DistributedContext
from trial_core.errors import TrialError

os.environ["LOCAL_WORLD_SIZE"] = "1"
os.environ["LOCAL_RANK"] = "0"
d = DistributedContext.from_torch_distributed()
dist.init_process_group("gloo")
try:
    d.connect()
except TrialError as error:
    print(json.dumps({"error": str(error)}))
"""


@pytest.mark.slots
def test_ranks_that_disagree_about_machines() -> None:
    """A LOCAL_WORLD_SIZE that is not true is found before a collective goes wrong."""
    said = run_ranks(DISAGREEMENT, 2)
    assert said[0]["error"].startswith(
        "rank 0 has local_size 1, but the ranks that say they are on machine 0 are [0, 1]; "
    )
