"""The process that starts ranks. With their ends: test_slot_group.py."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest

from tests.support.processes import descendants, kill, wait_until_gone
from tests.support.ranks import ROOT
from tests.support.slots import OwnSlots
from tests.support.waiting import until
from trial_core.errors import RankFailed, Stopped
from trial_core.messages import Done, Ping
from trial_core.processes.slots import fork_and_reap_ranks
from trial_core.processes.slots.fork_and_reap_ranks import StartRank, kill_sessions
from trial_core.processes.slots.fork_server import ForkServer
from trial_core.processes.slots.launcher import launch_locally

DEADLINE_SECONDS = 20

COUNTS_INTERPRETERS = """
import os
with open(os.path.join(os.path.dirname(__file__), "interpreters"), "a") as file:
    file.write(f"{os.getpid()}\\n")
"""


@pytest.fixture
def interpreters(tmp_path: Path) -> dict[str, str]:
    """The variable with which `interpreters_in` works."""
    (tmp_path / "sitecustomize.py").write_text(COUNTS_INTERPRETERS)
    path = [str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {"PYTHONPATH": os.pathsep.join(filter(None, path))}


def interpreters_in(folder: Path) -> list[int]:
    """The process ids of the interpreters that were started; a forked process is none."""
    return [int(line) for line in (folder / "interpreters").read_text().splitlines()]


def launched(folder: Path, server: ForkServer, variables: Mapping[str, str]) -> list[int]:
    """Launch two ranks, which answer; returns their process ids and that of their parent."""
    with OwnSlots(
        2, working_dir=folder, launcher=partial(launch_locally, server), environment=variables
    ) as slots:
        assert slots.request(Ping(), Done) == [Done(), Done()]
        (parent,) = {psutil.Process(pid).ppid() for pid in slots.pids}
        return [*slots.pids, parent]


def test_ranks_are_forked_also_by_a_later_group(
    tmp_path: Path, interpreters: dict[str, str]
) -> None:
    """One interpreter imports for all. Another environment gets another one."""
    with ForkServer(["colorsys"]) as server:
        *_, parent = launched(tmp_path, server, interpreters)
        *_, still = launched(tmp_path, server, interpreters)
        assert (still, interpreters_in(tmp_path)) == (parent, [parent])
        *_, other = launched(tmp_path, server, {**interpreters, "COLOUR": "blue"})
        assert interpreters_in(tmp_path) == [parent, other]
    assert wait_until_gone([parent, other], DEADLINE_SECONDS) == []


def test_a_rank_forks_its_persister(tmp_path: Path, interpreters: dict[str, str]) -> None:
    """It has what the fork server has imported, and ends with its rank, also one that is killed."""
    with ForkServer(["trial_core.checkpoint.transfer.persister"]) as server:
        launcher = partial(launch_locally, server)
        slots = OwnSlots(2, working_dir=tmp_path, launcher=launcher, environment=interpreters)
        with slots:
            slots.request(Ping(), Done)
            persisters = [
                child for pid in slots.pids for child in psutil.Process(pid).children()
            ]  # fmt: skip
            titles = [child.cmdline()[0].strip() for child in persisters]
            assert titles == [f"trialflow: persister of rank {rank}" for rank in range(2)]
            assert len(interpreters_in(tmp_path)) == 1
            os.kill(slots.pids[1], signal.SIGKILL)
            assert wait_until_gone([persisters[1].pid], DEADLINE_SECONDS) == []
    assert wait_until_gone([child.pid for child in persisters], DEADLINE_SECONDS) == []


USED_A_DEVICE = """
import sys, types
sys.modules["torch"] = types.SimpleNamespace(
    cuda=types.SimpleNamespace(_is_in_bad_fork=lambda: True)
)
"""


@pytest.mark.parametrize("code", [USED_A_DEVICE, "raise RuntimeError('no such library')"])
def test_ranks_that_cannot_use_the_imported_modules_are_new_interpreters(
    tmp_path: Path, interpreters: dict[str, str], code: str
) -> None:
    """CUDA does not work in a forked process if the process that forked it has used CUDA."""
    (tmp_path / "imported.py").write_text(code)
    with ForkServer(["imported"]) as server:
        *ranks, parent = launched(tmp_path, server, interpreters)
    assert sorted(interpreters_in(tmp_path)) == sorted([parent, *ranks])


def test_an_accelerator_of_another_kind_is_not_preloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not known whether its library can be forked."""
    commands: list[list[str]] = []

    def start(command: list[str], **options: object) -> None:
        commands.append(command)
        raise OSError("no process is needed")

    monkeypatch.setattr(subprocess, "Popen", start)
    for kind in ("cuda", "npu"):
        with pytest.raises(OSError, match="no process"):
            ForkServer(["colorsys"]).prepare({"DS_ACCELERATOR": kind}, tmp_path, tmp_path / "log")
    assert [command[-1] == "colorsys" for command in commands] == [True, False]


def test_a_stop_does_not_wait_for_imports(tmp_path: Path) -> None:
    """The import takes a minute; the ranks are forked after it."""
    (tmp_path / "imported.py").write_text("import time; time.sleep(60)")
    with ForkServer(["imported"]) as server, pytest.raises(Stopped, match="were starting"):
        OwnSlots(
            1,
            working_dir=tmp_path,
            launcher=partial(launch_locally, server),
            should_abort=lambda: True,
        )


def test_ranks_end_with_their_fork_server(tmp_path: Path) -> None:
    """The failure is that of killed ranks, and the next launch has another fork server."""
    with ForkServer() as server:
        with OwnSlots(2, working_dir=tmp_path, launcher=partial(launch_locally, server)) as slots:
            ranks = slots.pids
            for rank in ranks:
                os.kill(rank, signal.SIGSTOP)  # so none answers before it ends
            psutil.Process(ranks[0]).parent().kill()  # type: ignore[union-attr]
            with pytest.raises(RankFailed, match="SIGKILL"):
                slots.submit(Ping()).result(timeout=DEADLINE_SECONDS)
        assert wait_until_gone(ranks, DEADLINE_SECONDS) == []
        launched(tmp_path, server, {})


PAUSING = """
import signal
from trial_core.processes.slots import rank_main

rank_main.main = signal.pause
"""


def test_ranks_end_with_a_driver_that_has_not_read_what_it_was_told(tmp_path: Path) -> None:
    """It was stopped, and then killed: the kernel resets the connection."""
    (tmp_path / "imported.py").write_text(PAUSING)
    control, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", fork_and_reap_ranks.__name__]
    with other_end:
        end = other_end.fileno()
        server = subprocess.Popen(
            [*command, str(end), str(os.getpid()), "imported"],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, pass_fds=[end],
        )  # fmt: skip
    ranks: list[int] = []
    try:
        with control, open(os.devnull, "r+b") as nothing:
            start = StartRank(number=0, variables={}, folder=str(tmp_path))
            socket.send_fds(control, [msgspec.json.encode(start)], [nothing.fileno()] * 2)
            until(lambda: descendants(server.pid), "a rank")
            ranks = descendants(server.pid)
        assert server.wait(DEADLINE_SECONDS) == 0
        assert wait_until_gone(ranks, DEADLINE_SECONDS) == []
    finally:
        kill([server.pid, *ranks])
        server.wait()


NUMBER_OF_A_FORKED_RANK = """
import numpy, os
from trial_core.processes.slots import fork_and_reap_ranks, rank_main

numpy.random.seed(1)
rank_main.main = lambda: print(numpy.random.random() == numpy.random.RandomState(1).random())
descriptors = [os.dup(0), os.dup(1)]
given = fork_and_reap_ranks.StartRank(0, {}, ".")
fork_and_reap_ranks.become_rank(given, descriptors, os.dup(0), True)
"""


def test_numpy_draws_other_numbers_in_each_forked_rank() -> None:
    """As in ranks that import it: only trials are seeded, Core API scripts are not."""
    seen = subprocess.run(
        [sys.executable, "-c", NUMBER_OF_A_FORKED_RANK],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert seen.stdout.strip() == "False"


COMPILING = """
import signal, subprocess, sys
wait = [sys.executable, "-c", "import signal; signal.pause()"]
print(subprocess.Popen(wait, process_group=0).pid, flush=True)
signal.pause()
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Popen has no process_group")
def test_children_in_groups_of_their_own_are_killed() -> None:
    """As compilers that ninja has started."""
    command = [sys.executable, "-c", COMPILING]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        compiler = int(rank.stdout.readline())
        kill_sessions({rank.pid})
        assert wait_until_gone([compiler], DEADLINE_SECONDS) == []
    assert rank.returncode == -signal.SIGKILL


@pytest.mark.long
def test_the_imports_of_ranks_start_nothing() -> None:
    """A fork takes no thread along. MLflow has one; a trial may import it all the same."""
    program = (
        "import importlib, psutil, sys, threading\n"
        "from trial_core.processes.slots.rank_main import TRIAL_MODULES\n"
        "for name in TRIAL_MODULES:\n"
        "    importlib.import_module(name)\n"
        "assert threading.enumerate() == [threading.main_thread()], threading.enumerate()\n"
        "assert psutil.Process().children() == []\n"
        "assert 'mlflow' not in sys.modules\n"
        "assert 'torch._inductor.compile_fx' not in sys.modules  # it may start compilers\n"
        "import mlflow\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)
