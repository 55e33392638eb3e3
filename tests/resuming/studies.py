"""Runs of one kind of trial that are saved in batch 4 and resumed with changes, to batch 8.

Changes that are independent of each other share a resume.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.support.fitting import fit_toys
from tests.support.slots import Driven, build, drive, lines, toy_config
from trial_core.config import ExperimentConfig
from trial_core.messages import (
    BuildLoadersAndRestore,
    FetchCheckpoint,
    Fetched,
    ReadyToTrain,
    TrainBatches,
    Trained,
)
from trial_core.processes.slots.slot_group import SlotGroup

SETTINGS = {"lr": 0.02, "weight_decay": 0.3, "betas": [0.8, 0.95], "eps": 1e-4}
"""Of the optimizer."""
OTHERS = {
    "clip": 0.25, "ema": 0.25, "growth_interval": 50, "shuffle": False, "micro_batch": 2,
}  # fmt: skip
RESCHEDULED = {"schedule": "one", "length": 12, "lr": 0.02, "seed": 5}
SCHEDULED = {"schedule": "one"}
SAVED: dict[str, dict[str, Any]] = {"saved": {}, "scheduled": SCHEDULED}
WHOLE = {"whole": {}, "whole scheduled": SCHEDULED, "from the start": RESCHEDULED}
RESUMED: dict[str, tuple[str, dict[str, Any]]] = {
    "unchanged": ("saved", {}),
    "unchanged schedule": ("scheduled", SCHEDULED),
    "settings": ("saved", {**SETTINGS, **OTHERS}),
    "by hand": ("saved", {**OTHERS, "by_hand": SETTINGS}),
    "rescheduled": ("scheduled", RESCHEDULED),
    "smaller": ("saved", {"global_batch_size": 8}),
}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "batch": ("saved", {"global_batch_size": 24}),
    "optimizer": ("saved", {"optimizer": "SGD"}),
    "groups": ("saved", {"groups": 2}),
    "schedule": ("scheduled", {"schedule": "other"}),
}
"""Each of these changes is alone: a resume with it fails."""
KEPT = {"kept": ["optimizer.lr", "scaler"]}


@dataclass
class Seen:
    """What a run has noted.

    Attributes:
        batches: by rank: for each batch, a line for each of its micro-batches.
        told: what is said of changes.
        error: why it was refused.
    """

    batches: list[list[list[dict[str, Any]]]] = field(default_factory=list)
    told: str = ""
    error: str = ""

    def values(self, name: str, rank: int = 0) -> list[Any]:
        """One value of each batch: that of its last micro-batch."""
        return [lines_of[-1][name] for lines_of in self.batches[rank]]

    def samples(self) -> list[list[list[float]]]:
        """For each rank, the samples of each batch."""
        return [
            [[sample for line in batch for sample in line["samples"]] for batch in rank]
            for rank in self.batches
        ]


def seen_in(folder: Path, ranks: int, told: str = "") -> Seen:
    """What the ranks of a run have noted in its folder."""
    by_rank = [
        [[*each] for _, each in groupby(lines(folder, "seen", rank), lambda line: line["batch"])]
        for rank in range(ranks)
    ]
    return Seen(by_rank, told)


class Study(ABC):
    """The runs of one kind of trial, each of which runs when its result is first asked for."""

    def __init__(self, folder: Path, ranks: int, trial: str, hparams: Mapping[str, Any]) -> None:
        self.folder, self.ranks, self.trial, self.hparams = folder, ranks, trial, hparams
        self.is_torch = trial.endswith("Torch")
        self._seen: dict[str, Seen] = {}

    @abstractmethod
    def __getitem__(self, name: str) -> Seen:
        """The run of that name."""

    def _fields(self, run: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of an experiment."""
        run.mkdir(parents=True, exist_ok=True)
        given = {"global_batch_size": 16, **self.hparams, **changes, "record": str(run)}
        return {
            "reproducibility": {"experiment_seed": given.pop("seed", 1)},
            "optimizations": {
                "sharding": given.pop("sharding", "none"),
                "aggregation_frequency": given.pop("aggregation", 1),
            },
            "hyperparameters": given,
        }


class OnSlots(Study):
    """Of trials that ranks build from an experiment."""

    def __init__(self, slots: Callable[[int], SlotGroup], *of: Any) -> None:
        super().__init__(*of)
        self._slots = slots
        self._saved: dict[str, Driven] = {}

    def __getitem__(self, name: str) -> Seen:
        if name not in self._seen:
            self._seen[name] = self._run(name)
        return self._seen[name]

    def _config(self, name: str, batches: int, changes: Mapping[str, Any]) -> ExperimentConfig:
        return toy_config(
            self.folder, batches, entrypoint=f"changed_trials:{self.trial}",
            resources={"slots_per_trial": self.ranks},
            **self._fields(self.folder / name, changes),
        )  # fmt: skip

    def _run(self, name: str) -> Seen:
        slots, folder = self._slots(self.ranks), self.folder / name
        if name in WHOLE:
            drive(slots, self._config(name, 8, WHOLE[name]), folder)
            return seen_in(folder, self.ranks)
        of, changes = {**RESUMED, **REFUSED, **ACCUMULATED}[name]
        if of not in self._saved:
            config = self._config(of, 4, SAVED[of])
            self._saved[of] = drive(slots, config, self.folder / of, persist=True)
        saved = self._saved[of]
        uuid = saved.checkpoints[-1]
        try:
            build(slots, self._config(name, 8, changes), folder)
            fetch = FetchCheckpoint(uuid=uuid, files=saved.files[uuid], saved_by=saved.topology)
            assert slots.request(fetch, Fetched) == [Fetched()] * self.ranks
            restore = BuildLoadersAndRestore(
                batches_trained=4, checkpoint=uuid, saved_by=saved.topology, epoch=saved.epoch
            )
            ready = slots.request(restore, ReadyToTrain)
            slots.request(TrainBatches(until=8), Trained)
        except Exception as error:  # noqa: BLE001 - a test says which one is right
            return Seen(error=str(error))
        told = ready[0].settings
        return seen_in(folder, self.ranks, "; ".join([*told.new, *told.kept]))


ACCUMULATED: dict[str, tuple[str, dict[str, Any]]] = {"accumulated": ("saved", {"aggregation": 2})}


class InScripts(Study):
    """Of scripts that call `Trainer.fit`: two starts of a script, with all runs."""

    def __getitem__(self, name: str) -> Seen:
        if not self._seen:
            self._run_all()
        return self._seen[name]

    def _run_all(self) -> None:
        first = {**SAVED, **WHOLE}
        runs = [self._fit(name, 4 if name in SAVED else 8, of) for name, of in first.items()]
        ended = fit_toys("python", self.folder / "a", *runs, ranks=1)
        fitted = dict(zip(first, ended, strict=True))
        then, runs = {**RESUMED, **REFUSED, **ACCUMULATED, "kept": ("saved", SETTINGS)}, []
        if not self.is_torch:
            del then["accumulated"]
        for name, (of, changes) in then.items():
            # A store of its own: each continues the trial from batch 4.
            shutil.copytree(self.folder / of / "checkpoints", self.folder / name / "checkpoints")
            latest = {"latest_checkpoint": fitted[of][0]["checkpoint_uuid"]}
            runs.append(self._fit(name, 8, changes, keep=KEPT.get(name, []), **latest))
        ended = fit_toys("python", self.folder / "b", *runs, ranks=1)
        fitted |= dict(zip(then, ended, strict=True))
        for name, (result,) in fitted.items():
            told = " ".join(result.get("changes") or [])
            self._seen[name] = seen_in(self.folder / name, 1, told.partition("values count: ")[2])
            self._seen[name].error = result.get("error", "")
            assert name in REFUSED or not self._seen[name].error, (name, result)

    def _fit(
        self, name: str, batches: int, changes: Mapping[str, Any], **fit: Any
    ) -> dict[str, Any]:
        run = self.folder / name
        fields = self._fields(run, changes)
        hparams = fields.pop("hyperparameters")
        conf = {
            "name": "toy", "searcher": {"metric": "loss"}, "tensorboard_logging": False,
            "checkpoint_storage": f"file://{run}/checkpoints", **fields,
        }  # fmt: skip
        return {
            "trial": f"changed_trials:{self.trial}",
            "package": "trial_core.pytorch" if self.is_torch else "trial_core.deepspeed",
            "init": {"hparams": hparams, "exp_conf": conf},
            "fit": {"max_length": {"batches": batches}, **fit},
        }
