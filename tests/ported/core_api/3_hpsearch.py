"""Stages 2 and 3: stores checkpoints, ends when it is told to, continues, and has hyperparameters.

A checkpoint of another trial gives the value, and not the count of batches."""

import logging
import pathlib
from typing import Any

import determined as det


def save_state(x: int, steps_completed: int, trial_id: int, folder: pathlib.Path) -> None:
    with folder.joinpath("state").open("w") as f:
        f.write(f"{x},{steps_completed},{trial_id}")


def load_state(trial_id: int, folder: pathlib.Path) -> tuple[int, int]:
    folder = pathlib.Path(folder)
    with folder.joinpath("state").open("r") as f:
        x, steps_completed, ckpt_trial_id = [int(field) for field in f.read().split(",")]
    return (x, steps_completed) if ckpt_trial_id == trial_id else (x, 0)


def main(
    core_context: det.core.Context, latest_checkpoint: str | None, trial_id: int, hparams: Any
) -> None:
    x, starting_batch, max_length = 0, 0, hparams.get("length", 12)
    if latest_checkpoint is not None:
        with core_context.checkpoint.restore_path(latest_checkpoint) as path:
            x, starting_batch = load_state(trial_id, path)
    for batch in range(starting_batch, max_length):
        x += hparams["increment_by"]
        steps_completed = batch + 1
        if steps_completed % 5 == 0:
            core_context.train.report_training_metrics(
                steps_completed=steps_completed, metrics={"x": x}
            )
            core_context.train.report_progress(steps_completed / float(max_length))
            core_context.train.report_validation_metrics(
                steps_completed=steps_completed, metrics={"x": x, "batches": steps_completed}
            )
            with core_context.checkpoint.store_path({"steps_completed": steps_completed}) as (
                path,
                _,
            ):
                save_state(x, steps_completed, trial_id, path)
            if core_context.preempt.should_preempt():
                return


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format=det.LOG_FORMAT)
    info = det.get_cluster_info()
    assert info is not None, "this example only runs on-cluster"
    with det.core.init() as core_context:
        main(core_context, info.latest_checkpoint, info.trial.trial_id, info.trial.hparams)
