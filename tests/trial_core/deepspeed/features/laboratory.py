"""Runs a feature's trial, and checks what each column of the table promises."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from tests.support.consolidated import export_weights
from tests.support.slots import Driven, build, drive, toy_config
from tests.support.tensors import differing, tensors
from tests.trial_core.deepspeed.features.feature import Column, Feature
from tests.trial_core.deepspeed.reshard.resharding import files, resharded
from trial_core.config import ExperimentConfig
from trial_core.errors import TrialflowError
from trial_core.messages import (
    BuildLoadersAndRestore,
    HookDone,
    ReadyToTrain,
    RunHook,
    TrainBatches,
    Trained,
)
from trial_core.processes.machine.accelerators import count_accelerators
from trial_core.processes.slots.slot_group import SlotGroup

T = TypeVar("T")
Weights = dict[str, torch.Tensor]
FIRST, ALL = 3, 5
"""Batches until the run is interrupted, and in all."""


class Laboratory:
    """Runs trials of one feature at a time; the columns of a feature share their runs."""

    def __init__(self, warm_slots: Callable[[int], SlotGroup], folder: Path) -> None:
        self._warm_slots = warm_slots
        self._gpus = count_accelerators()
        self._folder = folder
        self._feature: Feature | None = None
        self._made: dict[str, Any] = {}

    def _slots(self, ranks: int) -> SlotGroup:
        """As many ranks; on a machine with fewer GPUs, one for each."""
        return self._warm_slots(min(ranks, self._gpus or ranks))

    def check(self, feature: Feature, column: Column) -> None:
        """Check a column.

        Raises:
            AssertionError: what the column promises does not hold.
            Exception: of the ranks.
        """
        if feature is not self._feature:
            self._feature, self._made = feature, {}
        checks: dict[Column, Callable[[Feature], None]] = {
            "train": self._trains, "save": self._saves, "resume": self._resumes,
            "ranks": self._changes_ranks, "export": self._exports,
        }  # fmt: skip
        checks[column](feature)

    def _trains(self, feature: Feature) -> None:
        """The loss of each batch is finite, and changes."""
        if feature.cell("resume") is None:  # it cannot be saved
            losses = self._trained_only(feature)
        else:
            losses = _losses(self._whole(feature))
        assert len(losses) == ALL
        assert all(map(math.isfinite, losses)), f"losses {losses}"
        assert len(set(losses)) > 1, f"each batch has the loss {losses[0]}"

    def _saves(self, feature: Feature) -> None:
        """Each rank's files are stored."""
        whole = self._whole(feature)
        assert self._stored(whole).is_dir()
        assert whole.files[whole.checkpoints[-1]]

    def _resumes(self, feature: Feature) -> None:
        """3 + 2 batches equal 5: each loss, and each tensor that is saved after them."""
        whole, first = self._whole(feature), self._first(feature)
        rest = self._run(feature, "rest", feature.ranks[0], ALL, first)
        assert rest.training == whole.training[FIRST:], "other losses"
        expected, seen = tensors(self._stored(whole)), tensors(self._stored(rest))
        _compare(expected, seen, "other tensors")
        assert rest.validation[-1] == whole.validation[-1], "other validation metrics"

    def _changes_ranks(self, feature: Feature) -> None:
        """From N ranks to M and from M to N the weights are the same, and training continues."""
        base, other = feature.ranks
        whole = self._whole(feature)
        self._first(feature)
        self._continues(feature, "first", other, whole)
        self._run(feature, "other", other, FIRST)
        self._continues(feature, "other", base, whole)

    def _continues(self, feature: Feature, source: str, ranks: int, whole: Driven) -> None:
        """The live weights after the restore are those before the save."""
        slots, part = self._slots(ranks), f"from {source}"
        config = self._config(feature, part, ranks, ALL, seed=9)
        saved = resharded(slots, config, self._part(part), self._made[source])
        slots.request(RunHook(hook="on_checkpoint_write_end"), HookDone)
        for engine in range(self._engines(saved)):
            before, after = (self._truth(each, engine) for each in (source, part))
            _compare(before, after, f"other weights on {ranks} ranks")
        if feature.tolerance is None:
            return
        losses = []
        for batch in range(FIRST, ALL):
            trained = slots.request(TrainBatches(until=batch + 1), Trained)
            losses.append(float((trained[0].metrics or {})["loss"]))
        expected = pytest.approx(_losses(whole)[FIRST:], rel=feature.tolerance)
        assert losses == expected, f"other losses on {ranks} ranks"

    def _exports(self, feature: Feature) -> None:
        """The exported weights are those of the live engine, by name."""
        whole = self._whole(feature)
        for engine in range(self._engines(whole)):
            exported = export_weights(self._stored(whole), engine)
            _compare(self._truth("whole", engine), exported, "other weights in the export")

    def _whole(self, feature: Feature) -> Driven:
        return self._run(feature, "whole", feature.ranks[0], ALL)

    def _first(self, feature: Feature) -> Driven:
        return self._run(feature, "first", feature.ranks[0], FIRST)

    def _run(
        self, feature: Feature, part: str, ranks: int, batches: int, resume: Driven | None = None
    ) -> Driven:
        config = self._config(feature, part, ranks, batches)
        return self._once(
            part,
            lambda: drive(
                self._slots(ranks), config, self._part(part), resume=resume, persist=True
            ),
        )

    def _trained_only(self, feature: Feature) -> list[float]:
        slots = self._slots(feature.ranks[0])
        build(slots, self._config(feature, "only", feature.ranks[0], ALL), self._part("only"))
        slots.request(BuildLoadersAndRestore(batches_trained=0, checkpoint=None), ReadyToTrain)
        trained = [slots.request(TrainBatches(until=batch + 1), Trained)[0] for batch in range(ALL)]
        return [float((each.metrics or {})["loss"]) for each in trained]

    def _once(self, what: str, make: Callable[[], T]) -> T:
        """The result of `make`, or the error that it raised, also for later calls."""
        if what not in self._made:
            try:
                self._made[what] = make()
            except TrialflowError as error:
                self._made[what] = error
        if isinstance(made := self._made[what], TrialflowError):
            raise made
        result: T = made
        return result

    def _config(
        self, feature: Feature, part: str, ranks: int, batches: int, seed: int = 1
    ) -> ExperimentConfig:
        hparams = {
            "zero_stage": feature.zero, "ds_config": dict(feature.config),
            "truth": str(self._part(part)), "seed": seed, **feature.hparams(ranks),
        }  # fmt: skip
        named = json.loads(json.dumps(hparams).replace("{folder}", str(self._part(part))))
        return toy_config(
            self._folder, batches, entrypoint=feature.trial, scheduling_unit=1,
            # Validations may draw random numbers, so each run has them after the same batches.
            min_validation_period={"batches": FIRST}, hyperparameters=named, **feature.experiment,
        )  # fmt: skip

    def _part(self, part: str) -> Path:
        assert self._feature is not None
        folder = self._folder / self._feature.name.replace(" ", "-") / part
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _truth(self, part: str, engine: int) -> Weights:
        """The live weights when a run last saved."""
        weights: Weights = torch.load(self._part(part) / f"truth-{engine}.pt")
        return weights

    def _stored(self, run: Driven) -> Path:
        return files(self._folder, run.checkpoints[-1])

    def _engines(self, run: Driven) -> int:
        return len(list(self._stored(run).glob("model[0-9]*")))


def _compare(expected: Weights, seen: Weights, what: str) -> None:
    found = differing(expected, seen)
    assert found == [], f"{what}: {len(found)} of {len(expected)}: {', '.join(found[:8])}"


def _losses(run: Driven) -> list[float]:
    return [float(each["loss"]) for each in run.training]
