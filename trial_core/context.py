"""`TrialContext`: what every trial can ask, whatever engine trains it. Follows Determined's."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from typing_extensions import Self

from trial_core.config.determined import hyperparameters
from trial_core.config.error_text import error_lines
from trial_core.distributed import DistributedContext
from trial_core.errors import ConfigError, TrialError
from trial_core.run.instruments import Instruments
from trial_core.units import EpochLength

DEBUGGED_TRIAL = "debug-00000000"


@dataclass
class RunInfo:
    """Where a context's answers come from; the controller keeps it up to date.

    Attributes:
        trial: the trial's id, ``name-1a2b3c4d``.
        experiment: the experiment configuration, as plain data.
        batches_trained: batches trained so far; inside `train_batch`, the current batch's index.
        epoch: how long an epoch is, once the loaders are built and if they have a length.
        stop_requested: whether the trial has asked to save and end.
        instruments: the TensorBoard writer and the profiler of this rank.
    """

    trial: str
    experiment: dict[str, Any]
    batches_trained: int = 0
    epoch: EpochLength | None = None
    stop_requested: bool = False
    instruments: Instruments = field(default_factory=Instruments)

    @property
    def experiment_seed(self) -> int:
        """The seed of everything random."""
        return int((self.experiment.get("reproducibility") or {}).get("experiment_seed") or 0)


class TrialContext:
    """Runtime information for a trial. Constructed by the controller, on every rank.

    Nothing here is a collective. What it hands out is a copy: to change it changes nothing.

    Attributes:
        distributed: which rank this is, and collectives with the others.
    """

    def __init__(self, info: RunInfo, distributed: DistributedContext) -> None:
        self._info = info
        self.distributed = distributed
        info.instruments.rank = distributed.get_rank()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """A context for debugging a trial in a script or notebook of its own, outside any run.

        Nothing is saved, reported or uploaded; TensorBoard files go to a temporary folder. In plain
        Python there is a single rank; under torchrun or ``deepspeed``, theirs.

        Args:
            config: an experiment configuration; only what the trial asks for must be in it.

        Raises:
            ConfigError: a hyperparameter is a range to search, and a trial needs a value.
        """
        try:
            hparams = hyperparameters(dict(config.get("hyperparameters") or {}))
        except ValidationError as error:
            raise ConfigError(f"hyperparameters: {'; '.join(error_lines(error))}") from error
        experiment = {**copy.deepcopy(dict(config)), "hyperparameters": hparams}
        distributed = DistributedContext.from_environment()
        return cls(RunInfo(DEBUGGED_TRIAL, experiment), distributed)

    @property
    def run_info(self) -> RunInfo:
        """Where the answers come from; for the controller, which keeps it up to date."""
        return self._info

    # -------------------------------------------------------------- the experiment and trial

    def get_experiment_config(self) -> dict[str, Any]:
        """The experiment configuration, as plain data."""
        return copy.deepcopy(self._info.experiment)

    def get_data_config(self) -> dict[str, Any]:
        """The `data` section of the experiment configuration."""
        return copy.deepcopy(dict(self._info.experiment.get("data") or {}))

    def get_hparams(self) -> dict[str, Any]:
        """All hyperparameters, by name."""
        return copy.deepcopy(dict(self._info.experiment.get("hyperparameters") or {}))

    def get_hparam(self, name: str) -> Any:
        """One hyperparameter.

        Raises:
            TrialError: there is none of that name.
        """
        hparams = self._info.experiment.get("hyperparameters") or {}
        if name not in hparams:
            known = ", ".join(sorted(hparams)) or "none"
            raise TrialError(
                f'the trial asks for hyperparameter "{name}", which the experiment does not set; '
                f"it sets: {known}"
            )
        return copy.deepcopy(hparams[name])

    def get_trial_id(self) -> int:
        """A number that identifies this trial: the hexadecimal end of its id."""
        return int(self._info.trial.rpartition("-")[2], 16)

    def get_experiment_id(self) -> int:
        """A number that identifies the experiment: the same for every run of the same name."""
        return zlib.crc32(str(self._info.experiment.get("name")).encode())

    # ------------------------------------------------------------------- where training is

    def get_stop_requested(self) -> bool:
        """Whether the trial has asked, on this rank, to save and end.

        What others ask for (another rank's trial, Cancel, a signal) is not told here.
        """
        return self._info.stop_requested

    def set_stop_requested(self, stop_requested: bool) -> None:
        """Ask the trial to finish its batch, save a checkpoint, and end. Any rank may.

        All ranks end after the same batch: this one, or the next where one has begun it by then.
        A validation is finished. Once a batch has ended with it, there is no way back.

        Raises:
            TrialError: `stop_requested` is no bool.
        """
        if not isinstance(stop_requested, bool):
            raise TrialError(f"set_stop_requested takes a bool, got {stop_requested!r}")
        self._info.stop_requested = stop_requested

    def current_train_batch(self) -> int:
        """Index of the batch being trained, from 0, over the whole life of the trial."""
        return self._info.batches_trained

    def is_epoch_start(self) -> bool:
        """Whether the current batch is the first to begin in its epoch.

        Raises:
            TrialError: nobody knows how long an epoch is; as of `is_epoch_end`.
        """
        batch, epoch = self._info.batches_trained, self._known_epoch("is_epoch_start")
        return batch == 0 or epoch.epoch_of(batch) != epoch.epoch_of(batch - 1)

    def is_epoch_end(self) -> bool:
        """Whether the current batch is the last to begin in its epoch."""
        batch, epoch = self._info.batches_trained, self._known_epoch("is_epoch_end")
        return epoch.epoch_of(batch + 1) != epoch.epoch_of(batch)

    # ------------------------------------------------------------- TensorBoard and profiling

    def get_tensorboard_writer(self) -> Any:
        """This rank's `torch.utils.tensorboard.SummaryWriter`, always the same one.

        Its event files are uploaded with the run. From here on the metrics that the run reports
        are written to it as well, as ``training/…`` and ``validation/…``, by rank 0.

        Raises:
            TrialError: TensorBoard is not installed.
        """
        return self._info.instruments.writer()

    def get_tensorboard_path(self) -> Path:
        """This rank's folder for TensorBoard; what is written there is uploaded with the run."""
        return self._info.instruments.folder()

    def set_enable_tensorboard_logging(self, enable_tensorboard_logging: bool) -> None:
        """Whether TensorBoard is served automatically: reported metrics written, files uploaded.

        False leaves files where they are, on this machine. True writes the reported metrics also
        for a trial that never asks for a writer. Call it on every rank, in ``__init__``.

        Raises:
            TrialError: `enable_tensorboard_logging` is no bool; or it is to be on, and TensorBoard
                is not installed.
        """
        if not isinstance(enable_tensorboard_logging, bool):
            raise TrialError(
                f"set_enable_tensorboard_logging takes a bool, got {enable_tensorboard_logging!r}"
            )
        self._info.instruments.set_automatic(enable_tensorboard_logging)

    def get_enable_tensorboard_logging(self) -> bool:
        """Whether files for TensorBoard are uploaded with the run; True unless switched off."""
        return self._info.instruments.automatic

    def set_profiler(self, *args: Any, **kwargs: Any) -> None:
        """Profile training with `torch.profiler.profile`, made of these arguments.

        Call it in ``__init__``, on the ranks to profile. It starts with training, steps after
        every batch, and stops at the end; ``on_trace_ready`` is overridden: traces go where
        TensorBoard's files go, and are uploaded with them.

        Raises:
            TrialError: a profiler is running already.
        """
        self._info.instruments.set_profiler(*args, **kwargs)

    # ---------------------------------------------------------------------------- internals

    def _known_epoch(self, question: str) -> EpochLength:
        if self._info.epoch is None:
            raise TrialError(
                f"{question}() needs to know how long an epoch is, but the training loader has no "
                "length (or is not built yet); return a loader that has a len()"
            )
        return self._info.epoch
