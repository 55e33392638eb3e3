"""`TrialContext`: what every trial can ask, whatever engine trains it. Follows Determined's."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

from trial_core.distributed import DistributedContext
from trial_core.errors import TrialError
from trial_core.units import EpochLength


@dataclass
class RunInfo:
    """Where a context's answers come from; the controller keeps it up to date.

    Attributes:
        trial: the trial's id, ``name-1a2b3c4d``.
        experiment: the experiment configuration, as plain data.
        batches_trained: batches trained so far; inside `train_batch`, the current batch's index.
        epoch: how long an epoch is, once the loaders are built and if they have a length.
    """

    trial: str
    experiment: dict[str, Any]
    batches_trained: int = 0
    epoch: EpochLength | None = None
    stop_requested: bool = field(default=False)


class TrialContext:
    """Runtime information for a trial. Constructed by the controller, on every rank."""

    def __init__(self, info: RunInfo, distributed: DistributedContext) -> None:
        self._info = info
        self.distributed = distributed

    def get_experiment_config(self) -> dict[str, Any]:
        """The experiment configuration, as plain data."""
        return self._info.experiment

    def get_data_config(self) -> dict[str, Any]:
        """The `data` section of the experiment configuration."""
        return dict(self._info.experiment.get("data") or {})

    def get_hparams(self) -> dict[str, Any]:
        """All hyperparameters, by name."""
        return dict(self._info.experiment.get("hyperparameters") or {})

    def get_hparam(self, name: str) -> Any:
        """One hyperparameter.

        Raises:
            TrialError: there is none of that name.
        """
        hparams = self.get_hparams()
        if name not in hparams:
            known = ", ".join(sorted(hparams)) or "none"
            raise TrialError(
                f'the trial asks for hyperparameter "{name}", which the experiment does not set; '
                f"it sets: {known}"
            )
        return hparams[name]

    def get_trial_id(self) -> int:
        """A number that identifies this trial: the hexadecimal end of its id."""
        return int(self._info.trial.rpartition("-")[2], 16)

    def get_experiment_id(self) -> int:
        """A number that identifies the experiment: the same for every run of the same name."""
        return zlib.crc32(str(self._info.experiment.get("name")).encode())

    def get_stop_requested(self) -> bool:
        """Whether somebody asked the trial to save and end."""
        return self._info.stop_requested

    def set_stop_requested(self, stop_requested: bool) -> None:
        """Ask the trial to finish its workload, save a checkpoint, and end. Any rank may."""
        if not isinstance(stop_requested, bool):
            raise TrialError(f"set_stop_requested takes a bool, got {stop_requested!r}")
        self._info.stop_requested = stop_requested

    def current_train_batch(self) -> int:
        """Index of the batch being trained, from 0, over the whole life of the trial."""
        return self._info.batches_trained

    def is_epoch_start(self) -> bool:
        """Whether the current batch is the first to begin in its epoch."""
        batch, epoch = self._info.batches_trained, self._known_epoch("is_epoch_start")
        return batch == 0 or epoch.epoch_of(batch) != epoch.epoch_of(batch - 1)

    def is_epoch_end(self) -> bool:
        """Whether the current batch is the last to begin in its epoch."""
        batch, epoch = self._info.batches_trained, self._known_epoch("is_epoch_end")
        return epoch.epoch_of(batch + 1) != epoch.epoch_of(batch)

    def _known_epoch(self, question: str) -> EpochLength:
        if self._info.epoch is None:
            raise TrialError(
                f"{question}() needs to know how long an epoch is, but the training loader has no "
                "length (or is not built yet); return a loader that has a len()"
            )
        return self._info.epoch
