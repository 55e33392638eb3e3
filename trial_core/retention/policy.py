"""Which checkpoints to keep and which to delete, and why. Pure: no I/O, no clock.

The rules are Determined's: a checkpoint stays if any of them wants it. To them comes what no rule
may overrule: a pin, and what a run needs. A deletion has its reason as well, in the same words.

What is *latest* is said in two ways, and both stay: the checkpoint that is furthest on, which a
run goes on from, and the one saved last. They differ after a damaged checkpoint: the run has gone
back behind it, and what it saves since must not be deleted for the sake of the damaged one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trial_core.checkpoint.manifest import Manifest
from trial_core.units import Batch, TrainUnit


@dataclass(frozen=True)
class RetentionPolicy:
    """What an experiment keeps. Defaults are Determined's.

    Attributes:
        save_trial_best: how many of the best checkpoints of each trial.
        save_trial_latest: how many of the latest checkpoints of each trial.
        save_experiment_best: how many of the best checkpoints of all trials together.
        keep_every: of each trial one checkpoint in so many batches or epochs: the first at or
            after each multiple.
        metric: the validation metric that says what is best. None: nothing does, and every
            checkpoint that was validated stays wherever the best are to stay.
        smaller_is_better: which way it improves.
    """

    save_trial_best: int = 1
    save_trial_latest: int = 1
    save_experiment_best: int = 0
    keep_every: TrainUnit | None = None
    metric: str | None = None
    smaller_is_better: bool = True

    def __post_init__(self) -> None:
        counts = (self.save_trial_best, self.save_trial_latest, self.save_experiment_best)
        if min(counts) < 0:
            raise ValueError(f"a number of checkpoints to keep is at least 0, got {min(counts)}")
        if self.keep_every is not None and not isinstance(self.keep_every.value, int):
            raise TypeError(f"keep_every is one number, got {self.keep_every!r}")

    def __str__(self) -> str:
        """In the words of the experiment file."""
        words = [
            f"save_trial_best {self.save_trial_best}",
            f"save_trial_latest {self.save_trial_latest}",
            f"save_experiment_best {self.save_experiment_best}",
        ]
        if self.keep_every is not None:
            words.append(f"keep_every {self.keep_every.value} {self.keep_every.unit}")
        return ", ".join(words)


@dataclass(frozen=True)
class RetentionDecision:
    """What becomes of a checkpoint.

    Attributes:
        keep: whether it stays.
        why: for people to read.
    """

    manifest: Manifest
    keep: bool
    why: str


def decide(
    manifests: Iterable[Manifest],
    policy: RetentionPolicy,
    *,
    needed: Mapping[str, str] | None = None,
    running: Collection[str] = (),
) -> list[RetentionDecision]:
    """What becomes of the checkpoints of one experiment, in the order given.

    To decide again over what was kept deletes nothing more.

    Args:
        manifests: all checkpoints of the experiment. Where `save_experiment_best` is 0, those of
            some of its trials will do, each trial whole.
        needed: uuids of checkpoints that must stay, and why: pins, what runs have started from.
        running: trials that run, or may: their newest checkpoints stay whatever the policy is.
    """
    manifests = list(manifests)
    trials: dict[str, list[Manifest]] = {}
    for manifest in manifests:
        trials.setdefault(manifest.trial, []).append(manifest)
    ranks = _Ranks(policy, manifests, trials.values())
    kept_every = {
        manifest.uuid: why
        for of_trial in trials.values()
        for manifest, why in _kept_every(of_trial, policy.keep_every)
    }

    def decision(manifest: Manifest) -> RetentionDecision:
        reasons = [
            *([needed[manifest.uuid]] if needed and manifest.uuid in needed else []),
            *ranks.reasons(manifest, manifest.trial in running),
            *([kept_every[manifest.uuid]] if manifest.uuid in kept_every else []),
        ]
        if reasons:
            return RetentionDecision(manifest, True, "; ".join(reasons))
        return RetentionDecision(manifest, False, ranks.shortcomings(manifest))

    return [decision(manifest) for manifest in manifests]


def own_metric(manifest: Manifest, metric: str) -> float | None:
    """The validation metric of this very checkpoint; None where it has none that can be compared.

    A checkpoint also carries the metrics of an earlier validation, which say nothing of itself.
    """
    value = manifest.metrics.get("validation", {}).get(metric)
    if not _was_validated(manifest) or isinstance(value, bool):
        return None
    return value if isinstance(value, (int, float)) and not math.isnan(value) else None


class _Ranks:
    """The place of each checkpoint in every order that a rule counts by, from 1."""

    def __init__(
        self,
        policy: RetentionPolicy,
        manifests: Collection[Manifest],
        trials: Iterable[list[Manifest]],
    ) -> None:
        self._policy = policy
        self._furthest: dict[str, int] = {}
        self._last_saved: dict[str, int] = {}
        self._best_of_trial: dict[str, int] = {}
        for of_trial in trials:
            self._furthest |= _places(sorted(of_trial, key=_how_far, reverse=True))
            self._last_saved |= _places(_last_saved_first(of_trial))
            self._best_of_trial |= _places(_best_first(of_trial, policy))
        self._best_of_experiment = _places(_best_first(manifests, policy))

    def reasons(self, manifest: Manifest, is_running: bool) -> list[str]:
        """Why it stays; empty where no rule wants it."""
        policy, uuid = self._policy, manifest.uuid
        found = []
        if is_running and min(self._furthest[uuid], self._last_saved[uuid]) == 1:
            found.append("its trial runs, and goes on from it after a failure")
        if self._furthest[uuid] <= policy.save_trial_latest:
            found.append(f"{_ordinal(self._furthest[uuid])}latest of its trial")
        elif self._last_saved[uuid] <= policy.save_trial_latest:
            found.append(f"{_ordinal(self._last_saved[uuid])}latest saved by its trial")
        for place, count, whole in (
            (self._best_of_trial.get(uuid), policy.save_trial_best, "trial"),
            (self._best_of_experiment.get(uuid), policy.save_experiment_best, "experiment"),
        ):
            if place is not None and place <= count:
                found.append(
                    f"{_ordinal(place)}best of its {whole} ({_metric_of(manifest, policy)})"
                )
        if not found and policy.metric is None and _was_validated(manifest) and self._wants_best:
            found.append("validated, and no metric says what is best")
        return found

    def shortcomings(self, manifest: Manifest) -> str:
        """Why no rule wants it."""
        policy, uuid = self._policy, manifest.uuid
        words = [_counted(f"{_ordinal(self._furthest[uuid])}latest", policy.save_trial_latest)]
        if self._wants_best and uuid in self._best_of_trial:
            value = _metric_of(manifest, policy)
            place = f"{_ordinal(self._best_of_trial[uuid])}best of its trial ({value})"
            words.append(_counted(place, policy.save_trial_best))
        elif self._wants_best:
            words.append(_metric_of(manifest, policy))
        if policy.save_experiment_best and uuid in self._best_of_experiment:
            place = f"{_ordinal(self._best_of_experiment[uuid])}best of its experiment"
            words.append(_counted(place, policy.save_experiment_best))
        if policy.keep_every is not None:
            words.append(f"not the first in {policy.keep_every.value} {policy.keep_every.unit}")
        return "; ".join(words)

    @property
    def _wants_best(self) -> bool:
        return self._policy.save_trial_best > 0 or self._policy.save_experiment_best > 0


def _kept_every(
    of_trial: Iterable[Manifest], every: TrainUnit | None
) -> Iterator[tuple[Manifest, str]]:
    """The first checkpoint of a trial at or after each multiple of `every`, and why it stays.

    It stays the first when others of the same stretch are deleted, or saved later.
    """
    if every is None:
        return
    seen: set[int] = set()
    for manifest in sorted(_last_saved_first(of_trial), key=lambda m: m.progress.batches_trained):
        stretch = _stretch(manifest, every)
        if stretch is None:
            yield manifest, "keep_every counts epochs, and how long one was is not known"
        elif stretch > 0 and stretch not in seen:
            seen.add(stretch)
            yield manifest, f"the first at or after {stretch * _number(every)} {every.unit}"


def _stretch(manifest: Manifest, every: TrainUnit) -> int | None:
    """How many multiples of `every` it has reached; None where that is not known."""
    batches = manifest.progress.batches_trained
    if isinstance(every, Batch):
        return batches // _number(every)
    if manifest.epoch is None:
        return None
    return manifest.epoch.epochs_completed(batches) // _number(every)


def _number(every: TrainUnit) -> int:
    if not isinstance(every.value, int):
        raise TypeError(f"keep_every is one number, got {every!r}")
    return every.value


def _how_far(manifest: Manifest) -> tuple[int, str, str]:
    """The order in which a run looks for a checkpoint to go on from."""
    return manifest.progress.batches_trained, manifest.created_at, manifest.uuid


def _when_saved(manifest: Manifest) -> tuple[str, int, str]:
    return manifest.created_at, manifest.progress.batches_trained, manifest.uuid


def _best_first(manifests: Collection[Manifest], policy: RetentionPolicy) -> list[Manifest]:
    """Those that can be compared. Of equals the earlier: a best is what was better before it."""
    if policy.metric is None:
        return []
    values = {each.uuid: own_metric(each, policy.metric) for each in manifests}

    def order(manifest: Manifest) -> tuple[float, int]:
        value = values[manifest.uuid] or 0
        return value if policy.smaller_is_better else -value, manifest.progress.batches_trained

    comparable = [each for each in manifests if values[each.uuid] is not None]
    return sorted(_last_saved_first(comparable), key=order)


def _last_saved_first(manifests: Iterable[Manifest]) -> list[Manifest]:
    """To be sorted further: of two with as many batches, the later stands first.

    A run that has gone back behind a damaged checkpoint saves the same state again.
    """
    return sorted(manifests, key=_when_saved, reverse=True)


def _places(in_order: Iterable[Manifest]) -> dict[str, int]:
    return {manifest.uuid: place for place, manifest in enumerate(in_order, start=1)}


def _was_validated(manifest: Manifest) -> bool:
    """Whether its state was validated, not only an earlier one."""
    return manifest.progress.validated_at == manifest.progress.batches_trained


def _metric_of(manifest: Manifest, policy: RetentionPolicy) -> str:
    """Its metric, or why it has none, for people to read."""
    if not _was_validated(manifest):
        return "not validated"
    if policy.metric is None:
        return "validated"
    value: Any = manifest.metrics.get("validation", {}).get(policy.metric)
    if isinstance(value, (int, float)):
        return (
            f"{policy.metric} {value:.6g}"
            if isinstance(value, float)
            else f"{policy.metric} {value}"
        )
    return f"no {policy.metric}" if value is None else f"{policy.metric} is no number"


def _counted(place: str, kept: int) -> str:
    return f"{place}, and {kept} {'is' if kept == 1 else 'are'} kept"


def _ordinal(place: int) -> str:
    """``""`` for the first, else ``"2nd "``, to stand before "best"."""
    if place == 1:
        return ""
    ending = "th" if 10 <= place % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(place % 10, "th")
    return f"{place}{ending} "
