"""`TrialContext`: a trial's access to its run, for every kind of trial. Follows Determined's."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from typing_extensions import Self

from trial_core.cluster_info import experiment_number, trial_number
from trial_core.config import OptimizationsConfig, ProfilingConfig, ReproducibilityConfig
from trial_core.config.determined import hyperparameters
from trial_core.config.error_text import closest_match, did_you_mean, error_lines, format_value
from trial_core.config.search_ranges import draw
from trial_core.config.sections import CheckpointingConfig
from trial_core.errors import ConfigError, TrialError, TrialTypeError, TrialValueError
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.trial.tensorboard import TensorBoard
from trial_core.schedule.units import EpochLength
from trial_core.schedule.work import NumberType, Work, said_work

DEBUGGED_TRIAL = "debug-00000000"


@dataclass
class RunInfo:
    """The state that a context reads; the controller keeps it up to date.

    Attributes:
        trial: the trial's id, ``name-1a2b3c4d5e6f``.
        experiment: the experiment configuration as trials see it, as plain data. The rest of the
            rank reads the sections below.
        initial_batch: the number of batches that earlier runs have trained.
        current_batch: index of the present or last trained batch; None before training.
        batch_samples: samples of one batch, over all ranks; 0 if unknown.
        micro_batch_samples: if the driver chooses them: see `micro_batches_of`.
        epoch: the length of an epoch; None before the loaders are built, or if they have none.
        stop_requested: True if the trial has asked to save and end.
        sample_work: as the trial has set it.
        samples_trained: see `trial_core.schedule.work.samples_of`.
    """

    trial: str
    experiment: dict[str, Any]
    batches_trained: int = 0
    initial_batch: int = 0
    current_batch: int | None = None
    batch_samples: int = 0
    micro_batch_samples: int | None = None
    epoch: EpochLength | None = None
    stop_requested: bool = False
    stop_reason: str | None = None
    tensorboard: TensorBoard = field(default_factory=TensorBoard)
    sample_work: Work = field(default_factory=lambda: Work(samples=1))
    samples_trained: int = 0

    @property
    def experiment_seed(self) -> int:
        return ReproducibilityConfig.unchecked(self.experiment).experiment_seed

    @property
    def compares_data(self) -> bool:
        return ReproducibilityConfig.unchecked(self.experiment).compare_data

    @property
    def checkpointing(self) -> CheckpointingConfig:
        return CheckpointingConfig.unchecked(self.experiment)

    @property
    def optimizations(self) -> OptimizationsConfig:
        return OptimizationsConfig.unchecked(self.experiment)

    @property
    def profiling(self) -> ProfilingConfig:
        return ProfilingConfig.unchecked(self.experiment)

    @property
    def tensorboard_logging(self) -> bool:
        """True if reported metrics go to TensorBoard, unless the trial decides otherwise."""
        return bool(self.experiment.get("tensorboard_logging", True))


class TrialContext:
    """Runtime information for a trial. The controller creates one on every rank.

    No method here is a collective. Returned configuration is a copy.

    Attributes:
        distributed: which rank this is, and collectives of small objects.
    """

    def __init__(self, info: RunInfo, distributed: DistributedContext) -> None:
        self._info = info
        self.distributed = distributed
        info.tensorboard.rank = distributed.get_rank()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """A context for debugging a trial in a script or notebook, outside a run.

        Nothing is saved, reported or uploaded; TensorBoard files go to a temporary folder. Plain
        Python has one rank; torchrun and ``deepspeed`` may start several.

        Args:
            config: an experiment configuration; it needs only the fields that the trial reads. In
                place of a search range, a value is drawn from it, by the experiment's seed.

        Raises:
            ConfigError: a search range is not complete, or a hyperparameter is not plain data.
        """
        info = RunInfo(DEBUGGED_TRIAL, copy.deepcopy(dict(config)))
        given = info.experiment.get("hyperparameters") or {}
        if not isinstance(given, Mapping):
            raise ConfigError(f"hyperparameters: expected a mapping, got {format_value(given)}")
        within = "hyperparameters: "
        try:
            plain, within = hyperparameters(given), ""
            info.experiment["hyperparameters"] = draw(plain, info.experiment_seed)
        except ValidationError as error:
            raise ConfigError(within + "; ".join(error_lines(error))) from error
        return cls(info, DistributedContext.from_environment())

    @property
    def run_info(self) -> RunInfo:
        """The state that this context reads; for the controller, which keeps it up to date."""
        return self._info

    # -------------------------------------------------------------- the experiment and trial

    def get_experiment_config(self) -> dict[str, Any]:
        """The experiment configuration, as plain data, with the fields that have no effect here."""
        experiment = copy.deepcopy(self._info.experiment)
        return _completed(experiment, experiment.pop("ignored_fields", {}))

    def get_data_config(self) -> dict[str, Any]:
        """The `data` section of the experiment configuration."""
        return copy.deepcopy(dict(self._info.experiment.get("data") or {}))

    def get_hparams(self) -> dict[str, Any]:
        """All hyperparameters, by name."""
        return copy.deepcopy(dict(self._info.experiment.get("hyperparameters") or {}))

    def get_hparam(self, name: str) -> Any:
        """One hyperparameter.

        Raises:
            TrialValueError: the experiment does not set it.
        """
        hparams = self._info.experiment.get("hyperparameters") or {}
        if name not in hparams:
            known = ", ".join(sorted(hparams)) or "none"
            raise TrialValueError(
                f'the trial asks for hyperparameter "{name}", which the experiment does not set; '
                f"it sets: {known}{self._hparam_hint(name, list(hparams))}"
            )
        return copy.deepcopy(hparams[name])

    def _hparam_hint(self, name: str, known: list[str]) -> str:
        """A hint at a misspelling: of the name, or of a script's section ``hyperparameters``."""
        if known:
            return did_you_mean(name, known)
        section, names = "hyperparameters", list(map(str, self._info.experiment))
        near = closest_match(section, [each for each in names if each != section])
        return f'; did you mean "{section}", where exp_conf has "{near}"?' if near else ""

    def get_trial_id(self) -> int:
        """A number that identifies this trial, from the hexadecimal end of its id."""
        return trial_number(self._info.trial)

    def get_trial_seed(self) -> int:
        """The seed of all random generators: ``reproducibility.experiment_seed``."""
        return self._info.experiment_seed

    def get_experiment_id(self) -> int:
        """A number that identifies the experiment: equal for all runs with the same name."""
        return experiment_number(self._info.experiment)

    # ------------------------------------------------------------------- where training is

    def get_stop_requested(self) -> bool:
        """Return whether the trial has requested a stop on this rank.

        Not set by other stop requests: another rank's trial, Cancel, a signal.
        """
        return self._info.stop_requested

    def set_stop_requested(self, stop_requested: bool = True, reason: str | None = None) -> None:
        """Have the run finish its batch, save a checkpoint and end. Any rank may call it.

        All ranks end after the same batch: this one, or the next if a rank has begun it already.
        A validation is finished first. The request cannot be withdrawn after the batch has ended.

        Args:
            reason: why, in a few words; the log, the report and the run's end show the first.

        Raises:
            TrialTypeError: `stop_requested` is not a bool, or `reason` is not text.
        """
        if not isinstance(stop_requested, bool):
            raise TrialTypeError(f"set_stop_requested takes a bool, got {stop_requested!r}")
        if reason is not None and not isinstance(reason, str):
            raise TrialTypeError(f"set_stop_requested: reason is text, got {reason!r}")
        info = self._info
        first = info.stop_reason if info.stop_requested and stop_requested else None
        info.stop_requested, info.stop_reason = stop_requested, first or reason

    def current_train_batch(self) -> int:
        """Index of the current batch, from 0, counted over all runs of the trial.

        Between two batches it is the last one. Before training it is the first one.
        """
        current = self._info.current_batch
        return self._info.batches_trained if current is None else current

    def get_initial_batch(self) -> int:
        """Index of the first batch of this run: how many batches earlier runs have trained.

        Known once the data loaders are built; 0 before.
        """
        return self._info.initial_batch

    def current_train_epoch(self) -> int:
        """The epoch in which the current batch begins, from 0. Raises TrialError if the length of
        an epoch is unknown."""
        return self._known_epoch("current_train_epoch").epoch_of(self.current_train_batch())

    def is_epoch_start(self) -> bool:
        """Return whether the current batch is the first to begin in its epoch. Raises TrialError as
        `current_train_epoch`."""
        batch, epoch = self.current_train_batch(), self._known_epoch("is_epoch_start")
        return batch == 0 or epoch.epoch_of(batch) != epoch.epoch_of(batch - 1)

    def is_epoch_end(self) -> bool:
        """Return whether the current batch is the last to begin in its epoch. Raises TrialError as
        `current_train_epoch`."""
        batch, epoch = self.current_train_batch(), self._known_epoch("is_epoch_end")
        return epoch.epoch_of(batch + 1) != epoch.epoch_of(batch)

    # ---------------------------------------------------------------------------- throughput

    def set_work_per_sample(
        self,
        tokens: float | None = None,
        flops: float | None = None,
        number_type: NumberType = "bf16",
    ) -> None:
        """Set the work in a sample: the run shows tokens/s and MFU. The last call of rank 0 counts.

        Args:
            tokens: the average number; None if unknown.
            flops: of the forward and backward pass, without recomputation; for a transformer about
                ``6 * parameters * tokens``. None if unknown, or if DeepSpeed's ``flops_profiler``
                measures them.
            number_type: bf16, fp16, tf32 or fp32; the device's peak for this type is 100 %.

        Raises:
            TrialTypeError, TrialValueError: a value is not positive and finite, or unknown.
        """
        self._info.sample_work = said_work(
            "set_work_per_sample", number_type, samples=1, tokens=tokens, flops=flops
        )

    # ------------------------------------------------------------- TensorBoard and profiling

    def get_tensorboard_writer(self) -> Any:
        """This rank's `torch.utils.tensorboard.SummaryWriter`, the same one on every call.

        Its event files are uploaded with the run. Rank 0 also writes the reported metrics to it, as
        ``Determined/loss`` and, for validation metrics, ``Determined/val_loss``.

        Raises:
            TrialError: TensorBoard is not installed.
        """
        return self._info.tensorboard.writer()

    def get_tensorboard_path(self) -> Path:
        """This rank's folder for TensorBoard; its files are uploaded with the run."""
        return self._info.tensorboard.folder()

    def set_enable_tensorboard_logging(self, enable_tensorboard_logging: bool) -> None:
        """Switch automatic TensorBoard logging: reported metrics are written, files are uploaded.

        On by default, if TensorBoard is installed. False keeps the files on this machine, and
        writes no metrics. Call it on every rank, in ``__init__``.

        Raises:
            TrialTypeError: the value is not a bool.
            TrialError: it is True, and TensorBoard is not installed.
        """
        if not isinstance(enable_tensorboard_logging, bool):
            raise TrialTypeError(
                f"set_enable_tensorboard_logging takes a bool, got {enable_tensorboard_logging!r}"
            )
        self._info.tensorboard.set_automatic(enable_tensorboard_logging)

    def get_enable_tensorboard_logging(self) -> bool:
        """Return whether TensorBoard files are uploaded with the run; True by default."""
        return self._info.tensorboard.automatic

    def set_profiler(self, *args: Any, **kwargs: Any) -> None:
        """Profile training with `torch.profiler.profile` and these arguments.

        Call it in ``__init__``, on the ranks to profile. The profiler starts with training, steps
        after every batch and stops at the end. ``on_trace_ready`` is replaced: traces go to the
        TensorBoard folder and are uploaded with it.

        Raises:
            TrialError: a profiler is already running.
        """
        self._info.tensorboard.set_profiler(*args, **kwargs)

    # ---------------------------------------------------------------------------- internals

    def _known_epoch(self, question: str) -> EpochLength:
        if self._info.epoch is None:
            raise TrialError(
                f"{question}() needs the length of an epoch, but the training loader has no length "
                "(or is not built yet); return a loader that has a len()"
            )
        return self._info.epoch


def _completed(experiment: dict[str, Any], ignored: Mapping[str, Any]) -> dict[str, Any]:
    """`experiment` with ignored fields in their places."""
    for name, value in ignored.items():
        section = experiment.setdefault(name, value)
        if section is not value and isinstance(section, dict) and isinstance(value, dict):
            _completed(section, value)
    return experiment
