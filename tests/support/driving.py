"""Drives a run in a test, without Prefect."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from trial_core.config import ExperimentConfig
from trial_core.driver.drive import drive_trial
from trial_core.driver.placement import Placement
from trial_core.driver.result import TrialResult
from trial_core.driver.run import Given
from trial_core.observe.events.observers import Observer
from trial_core.processes.slots.fork_server import ForkServer
from trial_core.schedule.stop_requests import StopHandler

TRIAL = "toy-0000beef"


class Seen(Observer):
    """Notes the stages that have succeeded, in their order."""

    def __init__(self) -> None:
        self.stages: list[str] = []

    def stage_ended(self, stage: str, detail: str, seconds: float) -> None:
        self.stages.append(f"{stage} {detail}".strip())


class Notices(Seen):
    """Also notes what people are told."""

    def __init__(self) -> None:
        super().__init__()
        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)


@contextmanager
def warm(server: ForkServer, home: Path) -> Iterator[None]:
    """Runs of the block have their ranks forked by `server`, and their files in `home`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIALFLOW_HOME", str(home))
        patch.setattr("trial_core.driver.placement.ForkServer", lambda *_: nullcontext(server))
        yield


def drive(
    config: ExperimentConfig,
    trial: str = TRIAL,
    stopping: StopHandler | None = None,
    observer: Observer | None = None,
    joining: Placement | None = None,
    **given: Any,
) -> TrialResult:
    """Train a trial to its end."""
    with StopHandler(config.stopping.grace_seconds) as own:
        run = Given(
            attempt="an attempt", stopping=stopping or own,
            find_logger=lambda: logging.getLogger("tests.driving"),
            observer=observer or Observer(), **given,
        )  # fmt: skip
        return drive_trial(config, trial, run, joining)
