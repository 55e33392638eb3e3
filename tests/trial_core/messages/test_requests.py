"""The driver's requests."""

from __future__ import annotations

from typing import get_args

from trial_core.messages import AnyRequest, RunHook
from trialflow.tasks import stages

TASKS = (
    stages.build_trial,
    stages.fetch_checkpoint,
    stages.build_loaders,
    stages.train_workload,
    stages.run_script,
    stages.attach_trial,
    stages.check_metrics,
    stages.validate,
    stages.checkpoint_save,
    stages.checkpoint_upload,
    stages.upload_run_files,
)


def test_messages_name_stages_as_the_ui_does() -> None:
    """An error says "during train-workload", not the class of the request."""
    titles = {request.__name__: request.stage for request in get_args(AnyRequest)}
    others = {
        titles.pop("Ping"): "a check of the channel",
        titles.pop("RunHook"): "callbacks",
        titles.pop("EndFit"): "the end of fit",
        titles.pop("Shutdown"): "the shutdown",
    }
    assert all(seen == expected for seen, expected in others.items())
    assert set(titles.values()) == {task.name for task in TASKS}


def test_a_hook_is_named() -> None:
    """As in the name of its task."""
    assert RunHook(hook="on_validation_end").title == "callbacks on_validation_end"
