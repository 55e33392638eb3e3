"""The ranks' imports begin before their run does."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.driving import drive
from tests.support.slots import TOY, toy_config
from trial_core.driver.placement import (
    ThisMachine,
    _importing as importing,
    importing_ahead,
    place_ranks,
)
from trial_core.processes.slots import fork_server

TRIAL = """
import os
from pathlib import Path

from toy_trial import ToyTrial


class LateTrial(ToyTrial):
    def __init__(self, context):
        super().__init__(context)
        Path(context.get_hparam("record"), "port").write_text(os.environ["LATE_PORT"])
"""


@pytest.mark.long
@pytest.mark.slots
def test_ranks_get_what_is_set_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run uses the process that imports already, and sets the variable in its ranks. A run with
    another variable gets another process."""
    made: list[fork_server.ServerProcess] = []

    class Counted(fork_server.ServerProcess):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(fork_server, "ServerProcess", Counted)
    code = tmp_path / "code"
    code.mkdir()
    shutil.copy(TOY / "toy_trial.py", code)
    (code / "late.py").write_text(TRIAL)
    config = toy_config(
        tmp_path, 2, code=str(code), entrypoint="late:LateTrial",
        resources={"slots_per_trial": 1}, hyperparameters={"record": str(tmp_path)},
    )  # fmt: skip
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path / "home"))
    with importing_ahead(config, ["LATE_"]):
        assert len(made) == 1
        monkeypatch.setenv("LATE_PORT", "4200")
        assert drive(config).batches_trained == 2
        assert (tmp_path / "port").read_text() == "4200"
        assert len(made) == 1

    with importing_ahead(config, ["LATE_"]):
        monkeypatch.setenv("OTHER_PORT", "1")
        drive(config, "toy-0000cafe")
        assert len(made) == 3


def test_a_run_within_a_run_has_another_fork_server(tmp_path: Path) -> None:
    """A fork server starts the ranks of one run at a time. A block within another imports once."""
    config = toy_config(tmp_path, resources={"preload": False})

    def placed() -> ExitStack:
        stack = ExitStack()
        placement = stack.enter_context(place_ranks(config, tmp_path, lambda text: None))
        assert isinstance(placement, ThisMachine)
        servers.append(placement._fork_server)
        return stack

    servers: list[fork_server.ForkServer] = []
    with importing_ahead(config):
        ahead = importing.get()
        with importing_ahead(config), placed(), placed():
            pass
        with placed():
            pass
    assert [server is ahead for server in servers] == [True, False, True]
