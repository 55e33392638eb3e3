"""The accelerators and environment of a run's ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trial_core.driver.drive
import trialflow.flows.evaluate
import trialflow.flows.prune
import trialflow.flows.train
from tests.support.gpus import fake_gpus
from tests.support.slots import build, toy_config
from trial_core.checkpoint.store import CheckpointStore
from trial_core.driver.drive import launch_slots
from trial_core.driver.placement import OnNodes, Placement, ThisMachine
from trial_core.driver.run import Launch, Run
from trial_core.errors import CheckpointError, LaunchError, RankFailed
from trial_core.observe.ledger.run_clock import RunClock
from trial_core.processes.machine.accelerators import resolve_slot_count
from trial_core.processes.slots.fork_server import ForkServer
from trialflow.flows.lifecycle.crash_limit import CrashedTooOften


@pytest.fixture
def one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose NVIDIA driver reports one GPU, and an environment that does not hide it."""
    fake_gpus(tmp_path, monkeypatch, 1)


@pytest.fixture
def this_machine() -> Iterator[ThisMachine]:
    """Starts ranks by a fork server of the test's own."""
    with ForkServer() as fork_server:
        yield ThisMachine(fork_server)


def toy_run(folder: Path, variables: dict[str, str]) -> Launch:
    """A run of the toy trial on two slots, not launched."""
    config = toy_config(folder, environment={"environment_variables": variables})
    return Launch(Run(config, "toy-0a", folder, CheckpointStore("memory://")))


@pytest.mark.slots
@pytest.mark.usefixtures("one_gpu")
def test_the_experiment_may_choose_cpu_ranks(tmp_path: Path, this_machine: ThisMachine) -> None:
    """DS_ACCELERATOR=cpu in the YAML applies to counting slots, too."""
    launch = toy_run(tmp_path, {"DS_ACCELERATOR": "cpu"})
    with launch_slots(launch, this_machine) as slots:
        assert slots.world_size == launch.run.clock.slots == 2
    with pytest.raises(LaunchError, match="this machine has 1 accelerator;"):
        launch_slots(toy_run(tmp_path, {}), this_machine)


def test_lost_nodes_are_not_counted_while_others_are_waited_for(tmp_path: Path) -> None:
    """The ledger has the slots of the nodes that are left."""
    now = [0.0]

    def gather(*_: Any, **options: Any) -> list[Any]:
        now[0] += 5
        return []

    launch = toy_run(tmp_path, {})
    launch.run.clock = RunClock(now=lambda: now[0])
    launch.run.clock.has_slots(4)
    pool: Any = SimpleNamespace(slots_left=3, slots_of=lambda agents: 4, gather=gather)
    assert OnNodes(pool, "4 slots", sends_code=False).prepare(launch)[0] == 4
    assert launch.run.clock.slot_milliseconds() == {"idle": 15_000}


WAIT_SECONDS = 0.05


class _Reached(Exception):
    """The flow has reached a patched function."""


@pytest.mark.server
@pytest.mark.parametrize("name", ["train", pytest.param("evaluate", marks=pytest.mark.long)])
def test_a_flow_gives_its_devices_to_its_run(
    here: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The devices that it has reserved. The wait for them is in a trial's ledger.

    The code is packed for checkpoints and for other machines: evaluate on this one needs neither.
    """
    module: Any = getattr(trialflow.flows, name)

    @contextmanager
    def devices(config: Any) -> Iterator[dict[str, str]]:
        time.sleep(WAIT_SECONDS)
        yield {"CUDA_VISIBLE_DEVICES": "2,3"}

    def reached(launch: Launch, placement: Placement) -> Any:
        waited = launch.run.clock.slot_milliseconds().get("queue", 0)
        raise _Reached(launch.run.devices, waited, launch.code.archive is not None)

    monkeypatch.setattr(module, "gpu_slots", devices)
    where = trial_core.driver.drive if name == "train" else module
    monkeypatch.setattr(where, "launch_slots", reached)
    monkeypatch.setattr(trialflow.flows.evaluate, "_candidates", lambda *_: [])
    with pytest.raises(_Reached) as seen:
        getattr(module, name)(toy_config(here))
    devices_of_run, queue_milliseconds, is_packed = seen.value.args
    assert devices_of_run == {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert name == "evaluate" or queue_milliseconds >= 1000 * WAIT_SECONDS
    assert is_packed == (name == "train")


@pytest.mark.server
@pytest.mark.parametrize("name", ["train", "evaluate"])
def test_a_flow_that_has_crashed_too_often_reserves_no_devices(
    here: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its `max_restarts` is the limit."""
    module: Any = getattr(trialflow.flows, name)

    def refuse(max_restarts: int) -> None:
        raise CrashedTooOften(f"more than {max_restarts}")

    def taken(config: Any) -> Any:
        raise _Reached("accelerators were taken")

    monkeypatch.setattr(module, "check_crash_limit", refuse)
    monkeypatch.setattr(module, "gpu_slots", taken)
    with pytest.raises(CrashedTooOften, match="more than 3"):
        getattr(module, name)(toy_config(here, max_restarts=3))


def test_a_trial_that_is_a_path_is_refused_at_once(tmp_path: Path) -> None:
    """By every flow with this parameter, before it waits for accelerators or lists a storage."""
    config = toy_config(tmp_path, checkpoint_storage={"url": str(tmp_path / "store")})
    for flow in (trialflow.flows.train.train, trialflow.flows.prune.prune):
        with pytest.raises(CheckpointError, match=r"'\.\./project' cannot be a trial's id"):
            flow.fn(config, trial="../project")


@pytest.mark.slots
@pytest.mark.usefixtures("one_gpu")
def test_ranks_without_their_gpu_refuse_to_train(tmp_path: Path, this_machine: ThisMachine) -> None:
    """The driver has counted one, and torch in the rank finds none: no training on the CPU."""
    config = toy_config(tmp_path, resources={"slots_per_trial": 1})
    launch = Launch(Run(config, "toy-0a", tmp_path, CheckpointStore("memory://")))
    found = r"on cuda device 0, but torch .* finds none: .*(CUDA|NVIDIA)"
    with (
        launch_slots(launch, this_machine) as slots,
        pytest.raises(RankFailed, match=found),
    ):
        build(slots, launch.run.config, tmp_path)


@pytest.mark.usefixtures("one_gpu")
def test_cpu_ranks_beside_gpus_are_a_choice(tmp_path: Path) -> None:
    """resources.accelerator: cpu."""
    config = toy_config(tmp_path, resources={"slots_per_trial": 2, "accelerator": "cpu"})
    assert config.rank_variables["DS_ACCELERATOR"] == "cpu"
    assert resolve_slot_count(2, {**os.environ, **config.rank_variables}) == 2
