"""`on_trial_shutdown` after a failure."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.fitting import fit_toys
from tests.support.slots import drive, lines, toy_config, warm_group
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import RankFailed
from trial_core.messages import RunHook
from trial_core.processes.slots.fork_server import ForkServer
from trial_core.pytorch import PyTorchCallback
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.controller import Controller
from trial_core.rank.trial.context import RunInfo
from trial_core.trainer.entrypoint import build_adapter


class Notes(PyTorchCallback):
    """Notes its shutdown; raises if told to."""

    def __init__(self, notes: list[str], name: str, raises: bool = False) -> None:
        self.notes = notes
        self.name = name
        self.raises = raises

    def on_trial_shutdown(self) -> None:
        self.notes.append(self.name)
        if self.raises:
            raise RuntimeError(f"{self.name} cannot shut down")


def attached(folder: Path, callbacks: dict[str, PyTorchCallback]) -> tuple[Controller, list[str]]:
    """A controller with a trial, and the hooks that a driver calls."""
    alone = DistributedContext.from_environment({})
    controller = Controller(build_adapter, emit=lambda _: None, distributed=alone)
    trial: Any = SimpleNamespace(
        callbacks=callbacks,
        topology=lambda: None,
        batch_samples=1,
        checkpoint_classes=(),
        setting_parts=list,
    )
    store = CheckpointStore(f"file://{folder}/checkpoints")
    return controller, controller.attach(trial, RunInfo("toy-0000beef", {}), folder, store).hooks


STARTUP = RunHook(hook="on_trial_startup", arguments={"first_batch_idx": 0, "checkpoint_uuid": ""})
SHUTDOWN = RunHook(hook="on_trial_shutdown", arguments={})


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        ([STARTUP], ["one", "two"]),
        ([STARTUP, SHUTDOWN], ["one", "two"]),
        ([], []),
    ],
    ids=["failed", "ended", "not started"],
)
def test_each_callback_is_shut_down_once(
    tmp_path: Path, requests: list[RunHook], expected: list[str]
) -> None:
    """By the driver, or after a failure by the rank; not if the trial was never started up."""
    notes: list[str] = []
    controller, hooks = attached(tmp_path, {"1": Notes(notes, "one"), "2": Notes(notes, "two")})
    assert hooks == ["on_trial_shutdown", "on_trial_startup"]
    for request in requests:
        controller.carry_out(request)
    controller.close()
    controller.close()
    assert notes == expected


def test_a_callback_that_cannot_shut_down_does_not_keep_the_others_from_it(tmp_path: Path) -> None:
    """Its error is raised after all are called."""
    notes: list[str] = []
    controller, _ = attached(
        tmp_path, {"1": Notes(notes, "one", raises=True), "2": Notes(notes, "two")}
    )
    controller.carry_out(STARTUP)
    with pytest.raises(RuntimeError, match="one cannot shut down"):
        controller.close()
    assert notes == ["one", "two"]


@pytest.mark.long
@pytest.mark.slots
@pytest.mark.parametrize("do", ["raise", "kill"])
def test_all_ranks_shut_down_after_a_failure(
    warm_server: ForkServer, tmp_path: Path, do: str
) -> None:
    """The rank that raised, and the one whose collective then fails; not a rank that was killed."""
    hparams = {"record": str(tmp_path), "at_batch": 1, "do": do, "do_rank": 1}
    config = toy_config(tmp_path, 2, hyperparameters=hparams)
    with warm_group(warm_server, 2) as slots, pytest.raises(RankFailed) as failure:
        drive(slots, config, tmp_path)
    assert failure.value.rank == 1
    for rank in (0, 1) if do == "raise" else (0,):
        assert lines(tmp_path, "hooks", rank)[-1]["hook"] == "on_trial_shutdown"


@pytest.mark.long
@pytest.mark.slots
def test_a_failed_fit_shuts_down(tmp_path: Path) -> None:
    """In a script, on the rank that raised."""
    hparams = {"record": str(tmp_path), "at_batch": 1, "do": "raise"}
    run = {"init": {"hparams": hparams}, "fit": {"max_length": {"batches": 2}}}
    with pytest.raises(AssertionError, match="the toy was told to break"):
        fit_toys("python", tmp_path, run, ranks=1)
    assert lines(tmp_path, "hooks", 0)[-1]["hook"] == "on_trial_shutdown"
