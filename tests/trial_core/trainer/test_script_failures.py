"""Failures of a script's ranks, of its driver, and Ctrl-C: with real processes.

Nothing but trialflow ends the ranks here: each is a process of its own, as under srun.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli import trialflow
from tests.support.fitting import WATCHED, Launcher, start, watched_ranks
from tests.support.hosts import DRIVER, Hosts, new_hosts
from tests.support.prefect import isolated
from tests.support.processes import kill
from tests.support.s3 import moto_server
from tests.trial_core.trainer.fits import store
from trial_core.checkpoint.store import CheckpointStore

pytestmark = pytest.mark.slots

# As the cells of a notebook: each is a fit, whose error does not end the process.
CELLS = """
import json, sys
sys.ps1 = ">>> "
sys.path.insert(0, sys.argv[1])
from fit_watched import fit

options = json.loads(sys.argv[2])
for cell in options.pop("cells"):
    try:
        result = fit({**options, **cell})
        print("ended", json.dumps([result["batches_trained"], result["stopped_early"]]))
    except Exception as error:
        print("ended", json.dumps([type(error).__name__, str(error)]))
"""


@pytest.mark.long
@pytest.mark.parametrize("killed", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_killed_rank_is_named_and_no_process_is_left(tmp_path: Path, killed: int) -> None:
    """SIGKILL to one rank: the other raises, the driver reports it and ends."""
    with watched_ranks(tmp_path) as ranks:
        ranks.until_batch(3)
        pids = ranks.pids()
        ranks.processes[killed].kill()
        ended = ranks.ended(1 - killed)
        assert ended["error"] == "RankFailed", ranks.logs()
        assert ended["text"].startswith(f"rank {killed} on "), ranks.logs()
        assert ranks.left(pids) == []
        assert f"**failed: rank {killed} on " in ranks.report()
    assert store(tmp_path).list() == []


@pytest.mark.long
def test_without_its_driver_every_rank_ends(tmp_path: Path) -> None:
    """SIGKILL to the driver. A rank that waits for another one in C++ code cannot raise."""
    with watched_ranks(tmp_path) as ranks:
        ranks.until_batch(3)
        pids = ranks.pids()
        kill([ranks.driver()])
        assert ranks.left(pids) == []
        for rank in (0, 1):
            said = [tmp_path / f"rank-{rank}.log", *tmp_path.glob(f"ended-{rank}.json")]
            assert "the driver is gone" in "".join(path.read_text() for path in said)
        assert "the driver of this script was ended by SIGKILL" in ranks.logs()


@pytest.mark.long
@pytest.mark.parametrize("failing", [0, 1])
def test_the_script_sees_its_own_exception(tmp_path: Path, failing: int) -> None:
    """The other rank raises what it is, or logs it and ends: it may wait in C++ code."""
    with watched_ranks(tmp_path, do="raise", rank=failing) as ranks:
        ranks.until_batch(3)
        pids = ranks.pids()
        own = ranks.ended(failing)
        assert own == {"error": "UsersError", "text": "of the trial"}, ranks.logs()
        assert (tmp_path / f"shut-down-{failing}").exists()  # on_trial_shutdown was called
        assert ranks.left(pids) == []
        cause = f"rank {failing} on {socket.gethostname()} raised UsersError: of the trial"
        assert cause in (tmp_path / f"rank-{1 - failing}.log").read_text()
        assert f"**failed: {cause}" in ranks.report()
        assert "Broken pipe" not in ranks.logs()


@pytest.mark.long
def test_ranks_that_hang_end_and_leave_their_stacks(tmp_path: Path) -> None:
    """One sleeps in its batch, the other waits for its gradients in C++ code."""
    limit = {"stopping": {"stall_timeout_seconds": 5}}
    with watched_ranks(tmp_path, do="sleep", rank=1, exp_conf=limit) as ranks:
        ranks.until_batch(3)
        pids = ranks.pids()
        ranks.processes[1].wait(60)
        assert ranks.left(pids) == []
        assert "no batch has ended for 5 s during train-workload" in ranks.logs()
        assert "no batch has ended for 5 s" in ranks.report()
        (logs,) = tmp_path.glob("home/*/logs")
        assert "in train_batch" in (logs / "rank-1.stacks").read_text()
        assert "Thread 0x" in (logs / "rank-0.stacks").read_text()


@pytest.mark.parametrize("launcher", ["python", pytest.param("torchrun", marks=pytest.mark.long)])
def test_ctrl_c_saves_and_returns(tmp_path: Path, launcher: Launcher) -> None:
    """The terminal sends it to its foreground group: to the script, or to torchrun."""
    with watched_ranks(tmp_path, launcher) as ranks:
        ranks.until_batch(3)
        pids = ranks.pids()
        os.killpg(ranks.processes[0].pid, signal.SIGINT)
        ended = ranks.ended(0)
        assert ended.get("stopped_early"), f"{ended}\n{ranks.logs()}"
        (saved,) = store(tmp_path).list()
        assert saved.uuid == ended["checkpoint_uuid"]
        assert saved.progress.batches_trained == ended["batches_trained"] > 3
        assert "stopped: interrupted (SIGINT)" in ranks.report()
        assert ranks.left(pids) == []


@pytest.mark.long
def test_trialflow_cancel_saves_and_returns(tmp_path: Path) -> None:
    """It signals the driver, which has all ranks save; no Prefect server knows the run."""
    with watched_ranks(tmp_path) as ranks:
        ranks.until_batch(3)
        pids = ranks.pids()
        nothing = {"PREFECT_API_URL": "", **isolated(tmp_path / "prefect")}
        done = trialflow(tmp_path, "cancel", "watched", variables=nothing)
        assert done.returncode == 0, done.stderr
        ended = ranks.ended(0)
        assert ended.get("stopped_early"), f"{ended}\n{ranks.logs()}"
        (saved,) = store(tmp_path).list()
        assert saved.progress.batches_trained == ended["batches_trained"] > 3
        assert "continues the trial if it is run again with latest_checkpoint" in done.stdout
        assert "stopped: preempted (SIGTERM)" in ranks.report()
        assert ranks.left(pids) == []


@pytest.mark.long
def test_a_notebooks_kernel_lives_on(tmp_path: Path) -> None:
    """After an error of the trial and the loss of the driver it fits again; Ctrl-C saves."""
    cells = [
        {"do": "raise", "rank": 0},
        {"do": "kill driver", "rank": 0},
        {"do": "interrupt", "rank": 0},
        {"latest": "latest", "batches": 12},
    ]
    script = tmp_path / "cells.py"
    script.write_text(CELLS)
    options = {"folder": str(tmp_path), "batches": 10**6, "cells": cells}
    output = start("python", tmp_path, 1, str(script), str(WATCHED.parent), json.dumps(options))
    ended = [json.loads(line[6:]) for line in output.splitlines() if line.startswith("ended ")]
    assert ended == [
        ["UsersError", "of the trial"], ["SlotsError", "the driver is gone"], [6, True], [12, False]
    ], output  # fmt: skip
    assert [each.progress.batches_trained for each in store(tmp_path).list()] == [6, 12]


@pytest.fixture
def hidden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that each host has for itself."""
    return tmp_path_factory.mktemp("hidden")


@pytest.fixture
def hosts(hidden: Path) -> Iterator[Hosts]:
    """A network of two hosts."""
    with new_hosts(hidden) as made:
        for _ in range(2):
            made.add()
        yield made


@pytest.mark.long
def test_ranks_of_two_hosts_train_store_and_resume(
    tmp_path: Path, hosts: Hosts, hidden: Path
) -> None:
    """A torchrun on each. The hosts share no folder of a run: each stores its rank's files."""
    first, _ = hosts.names
    hide = 'mount -t tmpfs none "$0" && mkdir -p "$1" && exec "${@:2}"'
    prefixes = [
        [
            "ip", "netns", "exec", name, "unshare", "--mount",
            "bash", "-c", hide, str(hidden), str(hidden / "home"),
            sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={number}",
            f"--master-addr={hosts.address(first)}", "--master-port=29777", "--nproc-per-node=1",
            "--no-python",
        ]
        for number, name in enumerate(hosts.names)
    ]  # fmt: skip
    own = {"TRIALFLOW_HOME": str(hidden / "home"), "GLOO_SOCKET_IFNAME": "eth0"}
    with moto_server(DRIVER) as server:
        place = {"url": server.new_bucket(), "options": server.options}
        for batches in (8, 12):
            with watched_ranks(
                tmp_path, prefixes=prefixes, environments=[own, own], batches=batches,
                latest="latest", exp_conf={"checkpoint_storage": place},
            ) as ranks:  # fmt: skip
                ended = [ranks.ended(rank) for rank in (0, 1)]
                assert ended[0].get("batches_trained") == batches, ranks.logs()
                assert ended[0] == ended[1]
                assert ranks.left(ranks.pids()) == []
        saved = CheckpointStore(place["url"], place["options"]).list()
    assert [each.progress.batches_trained for each in saved] == [8, 12]
    assert len({each.trial for each in saved}) == 1
    assert [{file.rank for file in each.files} for each in saved] == [{0, 1}, {0, 1}]
    for rank in (0, 1):
        trained = (tmp_path / f"batches-{rank}").read_text().split()
        assert trained == [str(batch) for batch in range(12)]
    assert not (hidden / "home").exists()
