"""The driver's requests."""

from __future__ import annotations

from typing import get_args

from trial_core.messages import AnyRequest, RunHook
from trialflow.tasks import (
    build,
    callbacks,
    checkpoint,
    run_script,
    train_workload,
    upload_run_files,
    validate,
)

TASKS = (
    build.build_trial,
    build.fetch_checkpoint,
    build.build_loaders,
    train_workload.train_workload,
    run_script.run_script,
    validate.check_metrics,
    validate.validate,
    checkpoint.checkpoint_save,
    checkpoint.checkpoint_upload,
    callbacks.callbacks,
    upload_run_files.upload_run_files,
)


def test_messages_name_stages_as_the_ui_does() -> None:
    """An error says "during train-workload", not the class of the request."""
    titles = {request.__name__: request.stage for request in get_args(AnyRequest)}
    others = {titles.pop("Ping"): "a check of the channel", titles.pop("Shutdown"): "the shutdown"}
    assert all(seen == expected for seen, expected in others.items())
    assert set(titles.values()) == {task.name for task in TASKS}


def test_a_hook_is_named() -> None:
    """As in the name of its task."""
    assert RunHook(hook="on_validation_end").title == "callbacks on_validation_end"
