"""The flow, the driver without Prefect, and `Trainer.fit` call the same hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.flows.test_evaluate import evaluate
from tests.support.consolidated import consolidated
from tests.support.driving import Seen, drive
from tests.support.fitting import fit_toys
from tests.support.flow import train
from tests.support.hook_calls import (
    CHECKPOINT,
    FRESH,
    FRESH_BATCHES,
    RESUMED,
    RESUMED_BATCHES,
    UPLOAD_END,
    VALIDATION,
    WORKLOAD,
    assert_calls,
    calls,
    hparams,
    logged,
)
from tests.support.slots import toy_config
from tests.support.stages import all_stages
from trial_core.checkpoint.store import CheckpointStore
from trial_core.observe.events.observers import observing
from trialflow.tasks.stages import as_prefect_task, task_of

DIFFERENT_IN_EACH_RUN = ("uuid", "folder")


def comparable(record: Path, rank: int) -> list[dict[str, Any]]:
    """Every call on a rank with its arguments, except for the ends of uploads beside training."""
    return [
        {name: value for name, value in line.items() if name not in DIFFERENT_IN_EACH_RUN}
        for line in logged(record, rank)
        if line["call"] != UPLOAD_END
    ]


@pytest.mark.parametrize("name", all_stages())
def test_the_flow_has_each_stage_as_a_task_of_its_name(name: str) -> None:
    """And the driver without Prefect as a function of that name. Three run beside training."""
    stage = all_stages()[name]
    task: Any = as_prefect_task(stage)
    if name in ("checkpoint_upload", "checkpoint_prune", "own_stage"):
        assert task.__name__ == "submit"
        task = task.__self__
    if name == "callbacks":  # which chooses hooks that are tasks
        task = task_of(stage)
    assert task.name == name.replace("_", "-")
    assert stage.work.__name__ == name


@pytest.mark.slots
@pytest.mark.server
def test_flow_and_driver_without_prefect_train_alike(here: Path) -> None:
    """The same stages, hooks and weights, bit for bit; only when an upload ends may differ."""
    seen: dict[str, list[str]] = {}
    weights: dict[str, dict[str, list[float]]] = {}
    for name in ("flow", "driver"):
        config = toy_config(
            here, 11, entrypoint="hook_trials:LogsCalls", scheduling_unit=7,
            min_validation_period={"batches": 3}, min_checkpoint_period={"batches": 5},
            checkpoint_storage=f"file://{here}/{name}-checkpoints",
            perform_initial_validation=True, hyperparameters=hparams(2, here / name),
        )  # fmt: skip
        observer = Seen()
        if name == "flow":
            with observing(observer):
                result = train(config)
        else:
            result = drive(config, "driver-0000beef", observer=observer)
        beside = ("checkpoint-upload", f"callbacks {UPLOAD_END}")
        seen[name] = [stage for stage in observer.stages if not stage.startswith(beside)]
        files = Path(str(result.checkpoint_url).removeprefix("file://"))
        found = consolidated(files / "model0", here / f"{name}-weights")
        weights[name] = {key: tensor.tolist() for key, tensor in found.items()}
    assert seen["flow"][:5] == [
        "build-trial", "callbacks on_trial_startup @0", "build-loaders @0",
        "callbacks on_training_start @0", "validate @0",
    ]  # fmt: skip
    assert seen["flow"] == seen["driver"]
    for rank in (0, 1):
        assert len(comparable(here / "flow", rank)) > 50
        assert comparable(here / "flow", rank) == comparable(here / "driver", rank)
    assert weights["flow"] == weights["driver"]


@pytest.mark.slots
@pytest.mark.server
@pytest.mark.long  # test_loop has the order of both, test_hooks the hooks of each stage
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_flow_and_fit_call_the_same_hooks(here: Path, ranks: int) -> None:
    """With the same arguments in the same order, on every rank, with mutually prime periods."""
    config = toy_config(
        here, 16, entrypoint="hook_trials:LogsCalls", scheduling_unit=7,
        min_validation_period={"batches": 3}, min_checkpoint_period={"batches": 5},
        perform_initial_validation=True, checkpoint_policy="best",
        resources={"slots_per_trial": ranks}, hyperparameters=hparams(ranks, here / "flow"),
    )  # fmt: skip
    train(config)
    fit = {
        "max_length": {"batches": 16}, "reporting_period": {"batches": 7},
        "validation_period": {"batches": 3}, "checkpoint_period": {"batches": 5},
        "step_zero_validation": True,
    }  # fmt: skip
    init = {
        "hparams": hparams(ranks, here / "fit"),
        "exp_conf": {"searcher": {"metric": "loss"}},
    }
    run = {"trial": "hook_trials:LogsCalls", "init": init, "fit": fit}
    fit_toys("torchrun", here / "fit", run, ranks=ranks)

    for rank in range(ranks):
        expected, seen = comparable(here / "flow", rank), comparable(here / "fit", rank)
        assert len(expected) > 100
        assert seen == expected
        flow_uploads, fit_uploads = (
            logged(here / each, rank, UPLOAD_END) for each in ("flow", "fit")
        )
        assert len(flow_uploads) == len(fit_uploads) > 3


@pytest.mark.slots
@pytest.mark.server
@pytest.mark.long
def test_metrics_that_on_validation_end_changes_count_in_flow_fit_and_evaluate(here: Path) -> None:
    """Those of rank 0: as the searcher metric, so that the first validation is the best."""
    searcher = {"name": "single", "metric": "perplexity", "max_length": {"batches": 2}}
    config = toy_config(
        here, entrypoint="validation_hook_trials:Changed", searcher=searcher,
        min_validation_period={"batches": 1},
    )  # fmt: skip
    flow = train(config)
    init = {"exp_conf": {"searcher": searcher, "checkpoint_storage": f"file://{here}/fit"}}
    fit = {"max_length": {"batches": 2}, "validation_period": {"batches": 1}}
    run = {"trial": "validation_hook_trials:Changed", "init": init, "fit": fit}
    ((first, second),) = fit_toys("torchrun", here / "script", run)
    assert first["validation_metrics"] == second["validation_metrics"] == flow.validation_metrics
    assert flow.validation_metrics["perplexity"] == 20
    for folder in ("checkpoints", "fit"):
        saved = CheckpointStore(f"file://{here}/{folder}").list()
        assert [each.metrics["validation"]["perplexity"] for each in saved] == [10, 20]
    assert evaluate(config).metrics["perplexity"] == 10


@pytest.mark.slots
@pytest.mark.server
@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_flow_calls_every_hook_at_its_place(here: Path, ranks: int) -> None:
    """On every rank, in a new run and a resumed one, with the uuid that the flow's result has."""

    def run(name: str, batches: int, trial: str | None = None) -> Any:
        config = toy_config(
            here, batches, entrypoint="hook_trials:LogsCalls", scheduling_unit=WORKLOAD,
            min_validation_period={"batches": VALIDATION}, perform_initial_validation=True,
            min_checkpoint_period={"batches": CHECKPOINT}, checkpoint_policy="none",
            resources={"slots_per_trial": ranks}, hyperparameters=hparams(ranks, here / name),
        )  # fmt: skip
        return train(config, trial)

    first = run("fresh", FRESH_BATCHES)
    run("resumed", RESUMED_BATCHES, first.trial)
    for rank in range(ranks):
        assert_calls(calls(here / "fresh", rank), FRESH)
        assert_calls(calls(here / "resumed", rank), RESUMED)
        assert logged(here / "fresh", rank, UPLOAD_END)[-1]["uuid"] == first.checkpoint_uuid
        (started,) = logged(here / "resumed", rank, "on_trial_startup")
        assert started["uuid"] == first.checkpoint_uuid
