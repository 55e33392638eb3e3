"""`DetCallback`: Hugging Face's `transformers.Trainer` under the Core API. Follows Determined's."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trial_core.core_api.context import Context
from trial_core.errors import TrialflowError

try:
    from transformers import TrainerCallback, TrainingArguments
except ImportError as error:
    raise TrialflowError(
        "trial_core.transformers needs Hugging Face's transformers, which cannot be imported "
        f"({error}): pip install 'trialflow[hf]'"
    ) from error

_SPEED = ("_runtime", "_per_second", "_compilation_time")


class DetCallback(TrainerCallback):
    """Reports a Trainer's metrics, stores its checkpoints, stops and resumes it. On every rank::

        with trial_core.init() as core_context:
            callback = DetCallback(core_context, args)
            trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
            trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)

    What the Trainer saves becomes a checkpoint of the run. Its last step is saved, and evaluated
    if ``eval_strategy`` is not ``"no"``. A run that is asked to stop saves after the step that all
    ranks are in. A run that resumes fetches its checkpoint into ``args.output_dir``, and sets
    ``args.resume_from_checkpoint``.

    Args:
        core_context: from `trial_core.init`.
        args: the Trainer's arguments.
        filter_metrics: report only metrics whose names contain one of these.
        user_data: plain data that each checkpoint holds, as ``my_data.json`` in its folder.
    """

    def __init__(
        self,
        core_context: Context,
        args: TrainingArguments,
        filter_metrics: Sequence[str] | None = None,
        user_data: Mapping[str, Any] | None = None,
    ) -> None:
        self.core_context = core_context
        self.filter_metrics = list(filter_metrics or [])
        if self.filter_metrics:
            self.filter_metrics.append(core_context.info.trial._config["searcher"]["metric"])
        self.user_data = user_data
        self.last_save, self.last_progress = -1, 0
        self._last_reports = {"training": -1, "validation": -1}
        self._is_stopping = False
        self.load_last_checkpoint(args)

    def load_last_checkpoint(self, args: TrainingArguments) -> None:
        """Fetch the checkpoint that the run resumes from. Collective: every rank calls this."""
        uuid, stored = self.core_context.info.latest_checkpoint, self.core_context.checkpoint
        if uuid is not None and not getattr(args, "overwrite_output_dir", False):
            stored.download(uuid, str(args.output_dir))
            # Not the newest folder there: a run that was killed may not have stored that one.
            name = f"checkpoint-{stored.get_metadata(uuid)['steps_completed']}"
            args.resume_from_checkpoint = os.path.join(str(args.output_dir), name)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Report what the Trainer logs, once a step and kind."""
        names = [name for name in logs or {} if name != "epoch" and not name.endswith(_SPEED)]
        is_validation = any(name.startswith("eval_") for name in names)
        kind = "validation" if is_validation else "training"
        # At its end, the Trainer sums up under the last step.
        is_first = self._last_reports[kind] != state.global_step
        if not names or not is_first or any(name.startswith("test_") for name in names):
            return
        self._last_reports[kind] = state.global_step
        if self.core_context.distributed.rank == 0:
            parts = self.filter_metrics or [""]
            kept = {name: logs[name] for name in names if any(part in name for part in parts)}
            metrics = {"batches": state.global_step, "epochs": state.epoch, **kept}
            self.core_context.train.report_metrics(kind, state.global_step, metrics)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Show how far training is. Save and end if the run was asked to stop."""
        percent = 100 * state.global_step // max(1, state.max_steps)
        if percent > self.last_progress:
            self.last_progress = percent
            self.core_context.train.report_progress(min(1.0, percent / 100))
        if self.core_context.preempt.should_preempt():
            self._is_stopping = control.should_training_stop = control.should_save = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Have the Trainer evaluate and save its last step."""
        step = state.global_step
        if control.should_training_stop or step >= state.max_steps:
            has_evaluated = step == self._last_reports["validation"] or self._is_stopping
            if not has_evaluated and args.eval_strategy != "no":
                control.should_evaluate = True
            control.should_save = control.should_save or step > self.last_save

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Store what the Trainer has saved, and wait for that. Collective."""
        if state.global_step == self.last_save:
            return
        self.last_save = step = state.global_step
        ranks = self.core_context.distributed
        ranks.allgather(None)  # all ranks have written their files
        saved = Path(str(args.output_dir)) / f"checkpoint-{step}"
        metadata = {"steps_completed": step, "trial_id": self.core_context.info.trial.trial_id}
        with self.core_context.checkpoint.store_path(metadata, shard=True) as (folder, _):
            if ranks.get_local_rank() == 0 and saved.is_dir():  # the ranks of a machine share it
                shutil.copytree(saved, folder / saved.name, copy_function=_link_or_copy)
            if ranks.get_rank() == 0 and self.user_data is not None:
                (folder / saved.name / "my_data.json").write_text(json.dumps(self.user_data))


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)
