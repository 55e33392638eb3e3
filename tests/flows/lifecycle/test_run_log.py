"""The log of tasks on the server."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID

import pytest
from prefect import flow, runtime, task
from prefect.logging import get_run_logger

from tests.flows.lifecycle.conftest import Stage
from trial_core.errors import Stopped, StorageError
from trial_core.observe.events.observers import Observer, observing
from trialflow.flows.lifecycle.run_log import about, readable_task_log

pytestmark = pytest.mark.server


@task(name="fails", task_run_name="fails @{batch}")
def fails(batch: int, error: Exception) -> None:
    get_run_logger().info("began")
    raise error


@flow(name="failing")
def failing(error: Exception) -> str:
    with readable_task_log():
        try:
            fails(7, error)
        except type(error):
            return str(runtime.flow_run.id)
    raise AssertionError("the task did not fail")


def test_a_task_that_a_stop_ends(stage: Stage) -> None:
    """No error, no traceback; each line names its task."""
    log = stage.log(UUID(failing(Stopped("nothing to save"))))
    lines = [(level, text) for level, text in log if text.startswith("fails @7: ")]
    assert lines == [
        (logging.INFO, "fails @7: began"),
        (logging.INFO, "fails @7: ended by the stop: nothing to save"),
    ]
    assert max(level for level, _ in log) == logging.INFO


def test_a_task_that_fails(stage: Stage) -> None:
    """An error stays an error, with its traceback."""
    log = stage.log(UUID(failing(StorageError("503 SlowDown"))))
    errors = [text for level, text in log if level == logging.ERROR]
    assert errors[0].startswith("fails @7: Task run failed with exception: ")
    assert "Traceback" in errors[0]
    assert errors[1].startswith("fails @7: Finished in state Failed(")


@flow(name="comparing")
def comparing() -> str:
    with readable_task_log(), about("challenger"):
        get_run_logger().info("its ranks start")
        with ThreadPoolExecutor(1) as pool:  # its channel has a thread, too
            pool.submit(get_run_logger().info, "a rank speaks").result()
        succeeds()
        beside()
    get_run_logger().info("compared")
    return str(runtime.flow_run.id)


@flow(name="beside")
def beside() -> None:
    get_run_logger().info("another run")


@task(name="succeeds", task_run_name="succeeds")
def succeeds() -> None:
    get_run_logger().info("began")


def test_lines_about_one_of_two_models(stage: Stage) -> None:
    """They name the model, on the server and to the observer of the run. Other runs' do not."""
    subjects: list[str] = []

    class Subjects(Observer):
        def subject_changed(self, subject: str) -> None:
            subjects.append(subject)

    with observing(Subjects()):
        lines = [text for _, text in stage.log(UUID(comparing()))]
        (other,) = stage.server.query("flow_runs/filter", {"flows": {"name": {"any_": ["beside"]}}})
    assert "challenger: its ranks start" in lines
    assert "challenger: a rank speaks" in lines
    assert "challenger: succeeds: began" in lines
    assert "another run" in [text for _, text in stage.log(UUID(other["id"]))]
    assert "compared" in lines
    assert subjects == ["challenger", ""]
