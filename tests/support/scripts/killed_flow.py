"""A flow that is killed, for a worker."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from prefect import flow, runtime, task
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound

from trialflow.flows.lifecycle.crash_limit import check_crash_limit


@flow
def killed(record: str, times: int) -> None:
    """Note the attempt in a file; be killed, so many times, in a task of a subflow."""
    check_crash_limit(times)
    file = Path(record)
    with file.open("a") as attempts:
        attempts.write(f"{os.getpid()}\n")
    part(len(file.read_text().split()) <= times)


@flow
def part(kills: bool) -> None:
    step(kills)


@task
def step(kills: bool) -> None:
    while kills:
        with suppress(ObjectNotFound), get_client(sync_client=True) as client:
            if client.read_task_run(runtime.task_run.id).state_name == "Running":
                os.kill(os.getpid(), signal.SIGKILL)
