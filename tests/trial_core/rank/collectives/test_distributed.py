"""`DistributedContext` on real ranks: construction, collectives, machines, deadlines."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.slots import ONE_TWO_FOUR
from trial_core.errors import TrialError
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.trainer.init import _rank_environment

LAUNCHER_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "GROUP_RANK",
    "CROSS_RANK", "CROSS_SIZE",
)  # fmt: skip

EVERY_COLLECTIVE = """
import json, os, torch, torch.distributed as dist
from trial_core.rank.collectives.distributed import DistributedContext

d = DistributedContext.from_torch_distributed()
if d.size > 1:
    dist.init_process_group("gloo")
    # As DeepSpeed does with CUDA: a rank that is not in a new group splits NCCL's communicator.
    dist.distributed_c10d._get_default_group().bound_device_id = torch.device("cuda", d.local_rank)
stuff = {"rank": d.rank}

class Noted:  # its pickle notes that it is read
    def __reduce__(self):
        return exec, ("import os; os.environ['READ'] = os.environ.get('READ', '') + 'x'",)

d.gather(Noted())
print(json.dumps({
    "getters": [d.get_rank(), d.get_size(), d.get_local_rank(), d.get_num_agents()],
    "attributes": [d.rank, d.size, d.local_rank, d.local_size, d.cross_rank, d.cross_size],
    "allgather": d.allgather(stuff),
    "gather": d.gather(stuff),
    "read": os.environ.get("READ", ""),
    "broadcast": d.broadcast(stuff),
    "allgather_local": d.allgather_local(stuff),
    "gather_local": d.gather_local(stuff),
    "broadcast_local": d.broadcast_local(stuff),
}))
if d.size > 1:
    dist.barrier()  # the store ends with rank 0
"""

FAILING_COLLECTIVE = """
import json, os, torch.distributed as dist
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.errors import SlotsError

d = DistributedContext.from_torch_distributed()
dist.init_process_group("gloo")
d.allgather("connected")
seen = {"error": None}
try:
    STATEMENT
except SlotsError as error:
    seen = {"error": type(error).__name__, "message": str(error)}
print(json.dumps(seen), flush=True)
# The others notice a rank that exits at once, so all stay until every deadline is over.
store = dist.distributed_c10d._get_default_store()
store.set(f"over {d.rank}", "")
store.wait([f"over {rank}" for rank in range(d.size)])
os._exit(0)
"""


def stuff_of(*ranks: int) -> list[dict[str, int]]:
    return [{"rank": rank} for rank in ranks]


@pytest.mark.slots
@pytest.mark.parametrize("world_size", ONE_TWO_FOUR)
def test_collectives_on_one_machine(world_size: int) -> None:
    """All ranks are on one machine, so local collectives equal the others."""
    expected_all = stuff_of(*range(world_size))
    for rank, result in enumerate(run_ranks(EVERY_COLLECTIVE, world_size)):
        assert result["getters"] == [rank, world_size, rank, 1]
        assert result["attributes"] == [rank, world_size, rank, world_size, 0, 1]
        assert result["allgather"] == result["allgather_local"] == expected_all
        expected = expected_all if rank == 0 else None
        assert result["gather"] == result["gather_local"] == expected
        assert result["broadcast"] == result["broadcast_local"] == {"rank": 0}


@pytest.mark.slots
def test_collectives_on_two_machines() -> None:
    """Local collectives stay on a machine; its first rank gathers and broadcasts."""
    for rank, result in enumerate(run_ranks(EVERY_COLLECTIVE, 4, local_size=2)):
        first = rank // 2 * 2
        assert result["getters"] == [rank, 4, rank % 2, 2]
        assert result["attributes"] == [rank, 4, rank % 2, 2, rank // 2, 2]
        assert result["allgather"] == stuff_of(0, 1, 2, 3)
        assert result["allgather_local"] == stuff_of(first, first + 1)
        assert result["gather"] == (stuff_of(0, 1, 2, 3) if rank == 0 else None)
        assert result["read"] == ("xxxx" if rank == 0 else "")  # other ranks do not get it
        assert result["gather_local"] == (stuff_of(first, first + 1) if rank % 2 == 0 else None)
        assert result["broadcast"] == {"rank": 0}
        assert result["broadcast_local"] == {"rank": first}


@pytest.mark.slots
@pytest.mark.long
def test_local_collectives_of_a_single_rank_per_machine() -> None:
    """They return the rank's own object."""
    for rank, result in enumerate(run_ranks(EVERY_COLLECTIVE, 2, local_size=1)):
        assert result["allgather_local"] == result["gather_local"] == stuff_of(rank)
        assert result["broadcast_local"] == {"rank": rank}
        assert result["allgather"] == stuff_of(0, 1)


def run_failing(statement: str, world_size: int) -> list[dict[str, Any]]:
    program = FAILING_COLLECTIVE.replace("STATEMENT", statement)
    return run_ranks(program, world_size, TRIALFLOW_COLLECTIVE_SECONDS="3")


@pytest.mark.long
@pytest.mark.slots
def test_a_missing_rank_is_named_within_the_deadline() -> None:
    """Rank 2 of 3 does not call the collective: the others raise and name it."""
    results = run_failing("d.rank == 2 or d.allgather(d.rank)", 3)
    assert results[2]["error"] is None
    for rank in (0, 1):
        assert results[rank]["message"].startswith(
            f"context.distributed.allgather (all) on rank {rank}"
        )
        assert "rank 2 did not come" in results[rank]["message"]
    waited = next(each for each in results if each["error"] == "DeadlineExceeded")
    assert "waited 3 s: rank 2 did not come. Every rank must call" in waited["message"]
    assert "TRIALFLOW_COLLECTIVE_SECONDS" in waited["message"]


@pytest.mark.slots
@pytest.mark.long
def test_a_rank_that_does_not_connect_is_named() -> None:
    """The same while the process groups are created."""
    setup = "d = DistributedContext.from_torch_distributed(); d.rank == 1 or d.connect()"
    results = run_failing(setup, 2)
    assert results[0]["error"] == "DeadlineExceeded"
    assert "context.distributed.connect (all) on rank 0 waited 3 s" in results[0]["message"]
    assert "rank 1 did not come" in results[0]["message"]


@pytest.mark.slots
def test_a_dead_rank_is_noticed_before_the_deadline() -> None:
    """Rank 0 exits, and with it the ranks' store."""
    leave = "(print('{}', flush=True), os._exit(0)) if d.rank == 0 else d.allgather(0)"
    results = run_failing(leave, 2)
    assert results[1]["error"] == "SlotsError"
    message = "context.distributed.allgather (all) on rank 1 failed after "
    assert results[1]["message"].startswith(message)


def built(monkeypatch: pytest.MonkeyPatch, how: str, **variables: str) -> DistributedContext:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    context: DistributedContext = getattr(DistributedContext, how)(chief_ip="10.0.0.1")
    return context


@pytest.mark.parametrize(
    ("how", "local_size", "cross_rank", "cross_size"),
    [
        ("from_torch_distributed", "LOCAL_WORLD_SIZE", "GROUP_RANK", None),
        ("from_deepspeed", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"),
    ],
)
def test_the_variables_of_a_launcher(
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    local_size: str,
    cross_rank: str,
    cross_size: str | None,
) -> None:
    """torchrun and DeepSpeed use different names, and torchrun sets no number of machines."""
    variables = {
        "RANK": "5",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "2",
        local_size: "3",
        cross_rank: "1",
    }
    context = built(monkeypatch, how, **variables, **({cross_size: "2"} if cross_size else {}))
    assert (context.rank, context.size) == (5, 6)
    assert (context.local_rank, context.local_size) == (2, 3)
    assert (context.cross_rank, context.cross_size) == (1, 2)
    assert context.chief_ip == "10.0.0.1"


@pytest.mark.parametrize("how", ["from_torch_distributed", "from_deepspeed"])
def test_the_environment_may_give_the_chiefs_address(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The argument precedes it. `init` uses it where a launcher gives no other address."""
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "DET_CHIEF_IP": "10.0.0.9"}
    assert built(monkeypatch, how, **variables).chief_ip == "10.0.0.1"
    assert getattr(DistributedContext, how)().chief_ip == "10.0.0.9"
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with _rank_environment():
        assert os.environ["MASTER_ADDR"] == "10.0.0.9"
    assert "MASTER_ADDR" not in os.environ
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.2")
    with _rank_environment():
        assert os.environ["MASTER_ADDR"] == "10.0.0.2"


def test_from_environment_without_a_launcher_is_a_single_rank() -> None:
    """Its collectives return its own object."""
    context = DistributedContext.from_environment({})
    assert (context.get_rank(), context.get_size(), context.get_num_agents()) == (0, 1, 1)
    assert context.allgather(7) == context.gather_local(7) == [7]


@pytest.mark.parametrize(
    ("how", "variables", "message"),
    [
        (
            "from_torch_distributed",
            {},
            "from_torch_distributed: RANK is not set in the environment; start the script "
            "with `torchrun`, which sets it",
        ),
        (
            "from_deepspeed",
            {"RANK": "0", "WORLD_SIZE": "2"},
            "from_deepspeed: LOCAL_RANK is not set in the environment; start the script with "
            "`deepspeed`, which sets it",
        ),
        (
            "from_deepspeed",
            {"RANK": "zero", "WORLD_SIZE": "2"},
            "RANK in the environment must be a number, got 'zero'",
        ),
        (
            "from_torch_distributed",
            {"RANK": "3", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
            "rank must be at least 0 and less than size, got 3 of 2",
        ),
    ],
)
def test_an_invalid_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch, how: str, variables: dict[str, str], message: str
) -> None:
    """The message names the variable, and the launcher that sets it."""
    with pytest.raises(TrialError, match=re.escape(message)):
        built(monkeypatch, how, **variables)


def test_from_horovod_names_the_alternatives() -> None:
    """Horovod is not supported."""
    message = r"Horovod is not supported \(its last release was in 2023\); start the ranks with"
    with pytest.raises(TrialError, match=message):
        DistributedContext.from_horovod(object())


def test_a_collective_before_init_process_group_is_refused() -> None:
    """The message names the function to call first."""
    context = DistributedContext(
        rank=0, size=2, local_rank=0, local_size=2, cross_rank=0, cross_size=1
    )
    with pytest.raises(TrialError, match=r"call deepspeed\.init_distributed\(\) first"):
        context.allgather(1)


@pytest.mark.parametrize("seconds", ["soon", "0", "-1", "inf"])
def test_a_deadline_must_be_a_positive_number(
    monkeypatch: pytest.MonkeyPatch, seconds: str
) -> None:
    """A collective cannot wait without limit."""
    monkeypatch.setenv("TRIALFLOW_COLLECTIVE_SECONDS", seconds)
    with pytest.raises(TrialError, match=rf"positive number of seconds, got '{seconds}'"):
        DistributedContext.from_environment({})


DISAGREEMENT = """
import json, os, torch.distributed as dist
from trial_core.rank.collectives.distributed import DistributedContext
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


@pytest.mark.long
@pytest.mark.slots
def test_ranks_that_disagree_about_machines_are_refused() -> None:
    """A wrong LOCAL_WORLD_SIZE is reported before any collective."""
    results = run_ranks(DISAGREEMENT, 2)
    assert results[0]["error"].startswith(
        "rank 0 has local_size 1, but the ranks of machine 0 are [0, 1]; "
    )
