"""`TrialflowCallback`: Hugging Face's `transformers.Trainer` in a run.

`DetCallback` is the same for scripts for Determined, which open the context of the run themselves.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from trial_core.errors import CheckpointError, TrialError, TrialflowError
from trial_core.messages import RestoredSettings
from trial_core.rank.collective_errors import run_on_all_ranks
from trial_core.rank.core_api.context import Context
from trial_core.rank.core_api.init import init
from trial_core.rank.core_api.script_host import current_slot
from trial_core.rank.core_api.searcher import SearcherOperation
from trial_core.rank.core_api.trainer_arguments import (
    TrainerRecord,
    changes,
    record_of,
    require_same_place,
    require_same_types,
)
from trial_core.rank.state_files.built_settings import read_resume_file
from trial_core.rank.state_files.trainer_folder import (
    CHECKPOINT,
    name_best_beside,
    require_safe,
)
from trial_core.schedule.work import Work

try:
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import TrainOutput
except ImportError as error:
    raise TrialflowError(
        "trial_core.transformers needs Hugging Face's transformers and accelerate, which cannot be "
        f"imported ({error}): pip install 'trialflow[hf]'"
    ) from error

logger = logging.getLogger(__name__)

_ENGINE = "trial_core.deepspeed.checkpoint_engine"  # imports DeepSpeed
_SPEED = ("_runtime", "_per_second", "_compilation_time")


class TrialflowCallback(TrainerCallback):
    """Makes the training of a `transformers.Trainer`, or of a class derived from it, a run::

        trainer = Trainer(model, args, train_dataset=data, callbacks=[TrialflowCallback()])
        trainer.train()

    Each checkpoint that the Trainer saves is stored in the run during training. The last step is
    saved in any case, and evaluated if ``eval_strategy`` is not ``"no"``. ``train`` resumes from
    the run's latest checkpoint, which is fetched into ``args.output_dir``, whatever its argument
    says. ``train`` returns when the last checkpoint is committed. The Trainer's logs are reported.
    A run that is asked to stop saves after the step that all ranks are in.

    The same script runs in the slots of ``trialflow train``, and with ``python`` or ``torchrun``.

    Args:
        filter_metrics: report only the searcher metric and metrics whose names contain one of
            these.
        user_data: plain data that each checkpoint holds, as ``my_data.json`` in its folder.
        init: arguments of `trial_core.init`, for a script outside a slot.

    Raises:
        TrialError: by ``train``: the run has trained before, or its latest checkpoint is not a
            Trainer's. Otherwise as `trial_core.init`.
        CheckpointError: by ``train``: the checkpoint was made with another class of optimizer, or
            with another number of samples a step, and is in the middle of an epoch; or one of its
            files may run code, and ``checkpointing.trusted`` is not set.
    """

    core_context: Context | None = None

    def __init__(
        self,
        *,
        filter_metrics: Sequence[str] | None = None,
        user_data: Mapping[str, Any] | None = None,
        **init: Any,
    ) -> None:
        self.filter_metrics = list(filter_metrics or [])
        self.user_data = user_data
        self._init = init
        self._forget()
        _open_runs_in_train()

    def _forget(self) -> None:
        """Forget an earlier training."""
        self.last_save, self.last_progress = -1, 0
        self._reported: dict[str, tuple[int, dict[str, Any]]] = {}
        self._stored: dict[str, str] = {}  # uuids, by the names of the folders
        self._is_stopping = self._is_save_due = False
        self._given: TrainerRecord | None = None
        self._before: TrainerRecord | None = None  # of the checkpoint

    # ----------------------------------------------------------------------- the run of a train

    @contextmanager
    def run_opened(self, args: TrainingArguments) -> Iterator[str | None]:
        """The run of a call of ``train``, and the folder to resume from. Every rank enters it."""
        self._forget()
        with init(**self._init) as self.core_context:
            host = self.core_context.host
            if host.has_trainer:
                raise TrialError(
                    "Trainer.train was called a second time in a run: its checkpoints would be "
                    "mistaken for the first one's; use a run, and a script, for each training"
                )
            host.has_trainer = True
            try:
                yield self._fetch(args)
            finally:
                if current_slot() is None:  # in a slot, later evaluations are reported, too
                    self.core_context = None

    def _fetch(self, args: TrainingArguments) -> str | None:
        """Fetch the checkpoint that the run resumes from; its folder. Collective."""
        context, output = self._context, Path(str(args.output_dir))
        uuid, stored = context.info.latest_checkpoint, context.checkpoint
        if uuid is None:
            return None
        with stored.restore_path(uuid) as fetched:
            folders = (each.name for each in fetched.iterdir() if each.is_dir())
            names = [*filter(CHECKPOINT.fullmatch, folders)]
        if len(names) != 1:
            raise TrialError(
                f"a Trainer cannot resume from checkpoint {uuid}: expected one folder "
                f"checkpoint-<step> in it, got {names}; begin a new trial"
            )
        self._require_safe(fetched)  # with the folders next to the Trainer's
        if context.distributed.get_local_rank() == 0:  # the ranks of a machine share it
            stored.download(uuid, output, selector=_below(names[0]))  # output may be the script's
            name_best_beside(output / names[0])
        self._stored[names[0]] = uuid
        self._fetch_best(stored.get_metadata(uuid).get("best_checkpoint"), output)
        return str(output / names[0])

    def _fetch_best(self, best: Mapping[str, str] | None, output: Path) -> None:
        """Fetch the best checkpoint, too, if this is another machine. Collective."""
        context = self._context
        known = best.items() if isinstance(best, Mapping) else ()  # else somebody's metadata
        best = {name: str(uuid) for name, uuid in known if CHECKPOINT.fullmatch(name)}
        missing = [name for name in best if not (output / name).is_dir()]
        if any(context.distributed.allgather(missing)):
            try:
                for name, uuid in best.items():
                    with context.checkpoint.restore_path(uuid) as fetched:
                        self._require_safe(fetched)
                    # By its whole uuid: it is not fetched again, so nothing else is.
                    context.checkpoint.download(fetched.name, output, selector=_below(name))
                    name_best_beside(output / name)
            except CheckpointError as error:
                logger.warning("the best checkpoint so far is not fetched: %s", error)
        self._stored.update(best)

    def _require_safe(self, folder: Path) -> None:
        """Refuse a fetched folder whose pickles may run code, unless trusted. Collective."""
        context = self._context
        if context.host.run.checkpointing.trusted:
            return

        def check() -> None:
            if context.distributed.get_local_rank() == 0:
                has_shards = any(folder.rglob("*_states.pt"))
                classes = import_module(_ENGINE).CHECKPOINT_CLASSES if has_shards else ()
                require_safe(folder, classes)

        run_on_all_ranks(context.distributed, check)

    def compare(self, trainer: Any, resume_from: Any) -> None:
        """Compare the Trainer's arguments with those of the folder that it resumes from.

        Raises:
            CheckpointError: the optimizer or the schedule is of another class.
        """
        own = type(trainer).create_optimizer is not Trainer.create_optimizer
        self._given = record_of(trainer, built_by_transformers=not own)
        if isinstance(resume_from, (str, os.PathLike)):
            self._before = read_resume_file(Path(resume_from), TrainerRecord)
        if self._before is not None:
            require_same_types(self._before, self._given)

    @property
    def _context(self) -> Context:
        if self.core_context is None:
            raise TrialError(
                "TrialflowCallback has no run: this Trainer does not train by transformers' train"
            )
        return self.core_context

    # ------------------------------------------------------------------------------- the hooks

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse a search. Do not train a step more if the checkpoint is the end's. Show the length
        of the training, and from now on its speed."""
        if state.is_hyper_param_search:
            raise TrialError(
                "Trainer.hyperparameter_search trains several models in one run; start a run for "
                "each set of hyperparameters"
            )
        if state.global_step >= state.max_steps and (state.epoch or 0) < state.num_train_epochs:
            raise _HasEnded
        if self._given is not None:
            self._given = self._given.with_loader(kwargs.get("train_dataloader"), args, state)
            if self._before is not None:
                require_same_place(self._before, self._given, args, state.global_step)
        samples = self._given.samples_of_a_step if self._given else 0.0
        host = self._context.host
        host.note_progress(state.global_step, state.max_steps)
        host.measure_steps(Work(samples=samples), is_default=True)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell what has changed since the checkpoint. What callbacks set at the start counts."""
        before, self._before = self._before, None  # once
        if before is None or self._given is None:
            return
        parts = kwargs.get("optimizer"), kwargs.get("lr_scheduler")
        told = changes(before, self._given, args, state.global_step, *parts)
        if told != RestoredSettings():
            self._context.host.settings_restored(told)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Report the Trainer's logs: all validation metrics of a step together."""
        names = [name for name in logs or {} if name != "epoch" and not name.endswith(_SPEED)]
        # At its end, the Trainer sums up.
        is_summary = any(name.startswith("test_") or name == "train_runtime" for name in logs or {})
        if self.core_context is None or not names or is_summary:
            return
        is_validation = any(name.startswith("eval_") for name in names)
        kind, step = "validation" if is_validation else "training", state.global_step
        at, before = self._reported.get(kind, (-1, {}))
        parts = list(self.filter_metrics)
        if parts:
            parts.append(self.core_context.info.trial._config["searcher"]["metric"])
        kept = {name: logs[name] for name in names if any(part in name for part in parts or [""])}
        place = {"batches": step, "epochs": state.epoch}
        metrics = {**(before if at == step else {}), **kept, **place}
        if (at, before) != (step, metrics):
            self._reported[kind] = (step, metrics)
            if self.core_context.distributed.rank == 0:
                self.core_context.train.report_metrics(kind, step, metrics)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Show how far training is. Save and end if the run was asked to stop."""
        self.last_progress = 100 * state.global_step // max(1, state.max_steps)
        self._context.host.note_progress(state.global_step, state.max_steps)
        if self._context.preempt.should_preempt():
            self._is_stopping = control.should_training_stop = control.should_save = True
        elif control.should_training_stop or not (state.epoch or 0) % 1:
            # The end of the epoch follows. It evaluates, and a checkpoint has the metrics so far.
            self._is_save_due, control.should_save = control.should_save, False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Have the Trainer evaluate and save its last step. Called after a stop, too."""
        step, is_saved = state.global_step, state.global_step == self.last_save
        is_due, self._is_save_due = self._is_save_due or control.should_save, False
        is_end = control.should_training_stop or step >= state.max_steps
        if self._is_stopping and (state.epoch or 0) % 1:  # within an epoch
            is_due = control.should_evaluate = False
        elif (
            is_end
            and not self._is_stopping
            and args.eval_strategy != "no"
            and self._reported.get("validation", (-1,))[0] != step
        ):
            control.should_evaluate = True
        # Again after an evaluation: the Trainer saves which checkpoint is the best one.
        control.should_save = is_due or (control.should_evaluate if is_saved else is_end)
        if is_saved:  # the Trainer may write the same files again
            self._context.host.wait_for_upload()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Store the Trainer's checkpoint, which is uploaded during training. Collective."""
        context, self.last_save = self._context, state.global_step
        ranks = context.distributed
        ranks.allgather(None)  # all ranks have written their files
        saved = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        metadata = {"steps_completed": state.global_step, "trial_id": context.info.trial.trial_id}
        best = Path(state.best_model_checkpoint or "").name
        if best in self._stored:
            metadata["best_checkpoint"] = {best: self._stored[best]}
        store = context.checkpoint.store_path(metadata, shard=True, wait=False)
        with store as (folder, self._stored[saved.name]):
            if ranks.get_local_rank() == 0 and saved.is_dir():  # the ranks of a machine share it
                # Links: the Trainer may delete its folder while it is uploaded.
                shutil.copytree(saved, folder / saved.name, copy_function=_link_or_copy)
            if ranks.get_rank() == 0 and self.user_data is not None:
                (folder / saved.name / "my_data.json").write_text(json.dumps(self.user_data))
            if ranks.get_rank() == 0 and self._given is not None:
                self._given.write(folder / saved.name)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait until the last checkpoint is committed."""
        self._context.host.wait_for_upload()


class DetCallback(TrialflowCallback):
    """`TrialflowCallback` as Determined's scripts use it. On every rank::

        with trial_core.init() as core_context:
            callback = DetCallback(core_context, args)
            trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
            trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)

    A run that resumes fetches its checkpoint into ``args.output_dir``, and sets
    ``args.resume_from_checkpoint``.

    Args:
        core_context: from `trial_core.init`.
        args: the Trainer's arguments.
        filter_metrics, user_data: see `TrialflowCallback`.
    """

    def __init__(
        self,
        core_context: Context,
        args: TrainingArguments,
        filter_metrics: Sequence[str] | None = None,
        user_data: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(filter_metrics=filter_metrics, user_data=user_data)
        self.core_context = core_context
        self._searcher = core_context.searcher
        self.load_last_checkpoint(args)

    @property
    def current_op(self) -> SearcherOperation | None:
        """The run's one operation; None if the experiment has no ``searcher.max_length``."""
        has_length = self._searcher.get_configured_units() is not None
        return next(self._searcher.operations()) if has_length else None

    def load_last_checkpoint(self, args: TrainingArguments) -> None:
        """Fetch the checkpoint that the run resumes from. Collective: every rank calls this."""
        if not getattr(args, "overwrite_output_dir", False):
            args.resume_from_checkpoint = self._fetch(args) or args.resume_from_checkpoint

    @contextmanager
    def run_opened(self, args: TrainingArguments) -> Iterator[str | None]:
        """The script has opened the run, and says from where to resume."""
        yield None


class _HasEnded(Exception):
    """The checkpoint to resume from is the last step's."""


def _open_runs_in_train() -> None:
    """Have ``Trainer.train`` open the run of its `TrialflowCallback`, if it has one.

    A callback cannot do that: it is called when the Trainer has chosen where to resume, and it does
    not learn that training has failed.
    """
    train: Callable[..., Any] = Trainer.train
    if hasattr(train, "opens_runs"):  # a rank process may run several scripts
        return

    @functools.wraps(train)
    def train_in_run(
        trainer: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        callbacks = trainer.callback_handler.callbacks
        callback = next((each for each in callbacks if isinstance(each, TrialflowCallback)), None)
        if callback is None:
            return train(trainer, resume_from_checkpoint, *args, **kwargs)
        with callback.run_opened(trainer.args) as folder:
            begin = folder or resume_from_checkpoint
            callback.compare(trainer, begin)
            try:
                return train(trainer, begin, *args, **kwargs)
            except _HasEnded:
                return _end(trainer)

    train_in_run.opens_runs = True  # type: ignore[attr-defined]
    Trainer.train = train_in_run  # type: ignore[method-assign, assignment]


def _end(trainer: Any) -> TrainOutput:
    """Do the work of ``train`` after its last step."""
    state = trainer.state
    if trainer.args.load_best_model_at_end and state.best_model_checkpoint is not None:
        trainer._load_best_model()
    trainer.control = trainer.callback_handler.on_train_end(trainer.args, state, trainer.control)
    trainer.is_in_train = False
    return TrainOutput(state.global_step, 0.0, {})


def _below(folder: str) -> Callable[[str], bool]:
    return lambda path: path.startswith(f"{folder}/")


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)
