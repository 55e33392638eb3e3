"""The retention policy: which checkpoints to keep and which to delete, and why. No I/O, no clock.

The rules are Determined's: a checkpoint stays if any rule keeps it. Pinned or held checkpoints and
checkpoints that a run needs stay whatever the rules say. Each deletion has a reason too.

*Latest* has two meanings, and both stay: the checkpoint with the most batches, which a run resumes
from, and the one saved last. They differ after a damaged checkpoint: the run has resumed from an
older one, and its new checkpoints must not be deleted in favour of the damaged one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, cast

from trial_core.checkpoint.manifest import Manifest
from trial_core.common.text_format import is_finite_number, ordinal
from trial_core.schedule.units import Batch, TrainUnit

RESUME_ORDER = attrgetter("resume_order")


@dataclass(frozen=True)
class RetentionPolicy:
    """How many checkpoints an experiment keeps, and which. The defaults are Determined's.

    Attributes:
        keep_every: per trial, keep the first checkpoint at or after each multiple of so many
            batches or epochs.
        metric: the validation metric that decides which checkpoint is best. If None, and best
            checkpoints are to be kept, all validated ones are.
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
            raise ValueError(
                f"the number of checkpoints to keep must be at least 0, got {min(counts)}"
            )
        if self.keep_every is not None and not isinstance(self.keep_every.value, int):
            raise TypeError(f"keep_every must be an integer number, got {self.keep_every!r}")

    def __str__(self) -> str:
        counts = ("save_trial_best", "save_trial_latest", "save_experiment_best")
        fields = [f"{name} {getattr(self, name)}" for name in counts]
        if self.keep_every is not None:
            fields.append(f"keep_every {self.keep_every.value} {self.keep_every.unit}")
        return ", ".join(fields)


@dataclass(frozen=True)
class RetentionDecision:
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
    """Decide on each of an experiment's checkpoints, in the order given. Deciding again on the kept
    checkpoints deletes no more.

    Args:
        manifests: all checkpoints of the experiment. If `save_experiment_best` is 0, all
            checkpoints of some of its trials are enough.
        needed: uuids of checkpoints that must stay, and why: pins, holds, claims.
        running: trials that run, or may run: their newest checkpoints stay.
    """
    manifests = list(manifests)
    standings = _Standings(policy, manifests)
    decisions = []
    for manifest in manifests:
        reasons = standings.reasons_to_keep(manifest, manifest.trial in running)
        if needed and manifest.uuid in needed:
            reasons.insert(0, needed[manifest.uuid])
        why = "; ".join(reasons) or standings.reason_to_delete(manifest)
        decisions.append(RetentionDecision(manifest, bool(reasons), why))
    return decisions


def own_metric(manifest: Manifest, metric: str) -> float | None:
    """The validation metric of this checkpoint's own state; None if that is not a finite number."""
    value = manifest.metrics.get("validation", {}).get(metric)
    return value if is_finite_number(value) else None


def best_of_trial(manifests: Collection[Manifest]) -> Manifest | None:
    """The best of all checkpoints of a trial, by the searcher metric that the newest one names: the
    one that the policy keeps as the best of its trial. None if no checkpoint has that metric at its
    own batch, or none names a metric."""
    newest = max(manifests, key=RESUME_ORDER, default=None)
    searcher = newest.config.get("searcher") if newest is not None else None
    if not isinstance(searcher, Mapping) or not isinstance(searcher.get("metric"), str):
        return None
    policy = RetentionPolicy(
        metric=searcher["metric"], smaller_is_better=searcher.get("smaller_is_better") is not False
    )
    return next(iter(_best_first(manifests, policy)), None)


class _Standings:
    """Each checkpoint's place, from 1, in every order that a rule counts by."""

    def __init__(self, policy: RetentionPolicy, manifests: Collection[Manifest]) -> None:
        self._policy = policy
        self._furthest: dict[str, int] = {}
        self._last_saved: dict[str, int] = {}
        self._best_of_trial: dict[str, int] = {}
        self._kept_every: dict[str, str] = {}
        trials: dict[str, list[Manifest]] = {}
        for manifest in manifests:
            trials.setdefault(manifest.trial, []).append(manifest)
        for of_trial in trials.values():
            self._furthest |= _places(sorted(of_trial, key=RESUME_ORDER, reverse=True))
            self._last_saved |= _places(_last_saved_first(of_trial))
            self._best_of_trial |= _places(_best_first(of_trial, policy))
            self._kept_every.update(_kept_every(of_trial, policy.keep_every))
        self._best_of_experiment = _places(_best_first(manifests, policy))

    def reasons_to_keep(self, manifest: Manifest, is_running: bool) -> list[str]:
        policy, uuid = self._policy, manifest.uuid
        found = []
        if is_running and min(self._furthest[uuid], self._last_saved[uuid]) == 1:
            found.append("its trial runs, and resumes from it after a failure")
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
        if not found and policy.metric is None and manifest.is_validated and self._keeps_best:
            found.append("validated, and all validated ones are kept")
        if uuid in self._kept_every:
            found.append(self._kept_every[uuid])
        return found

    def reason_to_delete(self, manifest: Manifest) -> str:
        policy, uuid = self._policy, manifest.uuid
        reasons = [_counted(f"{_ordinal(self._furthest[uuid])}latest", policy.save_trial_latest)]
        if self._keeps_best and uuid in self._best_of_trial:
            value = _metric_of(manifest, policy)
            place = f"{_ordinal(self._best_of_trial[uuid])}best of its trial ({value})"
            reasons.append(_counted(place, policy.save_trial_best))
        elif self._keeps_best:
            reasons.append(_metric_of(manifest, policy))
        if policy.save_experiment_best and uuid in self._best_of_experiment:
            place = f"{_ordinal(self._best_of_experiment[uuid])}best of its experiment"
            reasons.append(_counted(place, policy.save_experiment_best))
        if policy.keep_every is not None:
            reasons.append(f"not the first in {policy.keep_every.value} {policy.keep_every.unit}")
        return "; ".join(reasons)

    @property
    def _keeps_best(self) -> bool:
        return self._policy.save_trial_best > 0 or self._policy.save_experiment_best > 0


def _kept_every(of_trial: Iterable[Manifest], every: TrainUnit | None) -> Iterator[tuple[str, str]]:
    """The uuid of a trial's first checkpoint at or after each multiple of `every`; why it stays. It
    remains the first if others before the next multiple are deleted or saved later."""
    if every is None:
        return
    interval = cast(int, every.value)  # `RetentionPolicy` has checked it
    seen: set[int] = set()
    for manifest in sorted(_last_saved_first(of_trial), key=lambda m: m.progress.batches_trained):
        reached = manifest.progress.batches_trained
        if not isinstance(every, Batch):
            if manifest.epoch is None:
                why = "keep_every counts epochs, and the length of its epochs is not known"
                yield manifest.uuid, why
                continue
            reached = manifest.epoch.epochs_completed(reached)
        multiples = reached // interval
        if multiples > 0 and multiples not in seen:
            seen.add(multiples)
            yield (manifest.uuid, f"the first at or after {multiples * interval} {every.unit}")


def _best_first(manifests: Collection[Manifest], policy: RetentionPolicy) -> list[Manifest]:
    """The comparable checkpoints, best first. Of equals, the one with fewer batches is first."""
    if policy.metric is None:
        return []
    values = {each.uuid: own_metric(each, policy.metric) for each in manifests}

    def order(manifest: Manifest) -> tuple[float, int]:
        value = values[manifest.uuid] or 0
        return value if policy.smaller_is_better else -value, manifest.progress.batches_trained

    comparable = [each for each in manifests if values[each.uuid] is not None]
    return sorted(_last_saved_first(comparable), key=order)


def _last_saved_first(manifests: Iterable[Manifest]) -> list[Manifest]:
    """Last saved first. For a stable sort by batches: of equals the one saved last is first. A run
    that has resumed from before a damaged checkpoint saves the same state again."""
    save_order = attrgetter("created_at", "progress.batches_trained", "uuid")
    return sorted(manifests, key=save_order, reverse=True)


def _places(in_order: Iterable[Manifest]) -> dict[str, int]:
    return {manifest.uuid: place for place, manifest in enumerate(in_order, start=1)}


def _metric_of(manifest: Manifest, policy: RetentionPolicy) -> str:
    """The checkpoint's metric, or why it has none, as text."""
    if not manifest.is_validated:
        return "not validated"
    if policy.metric is None:
        return "validated"
    value: Any = manifest.metrics.get("validation", {}).get(policy.metric)
    if isinstance(value, float):
        return f"{policy.metric} {value:.6g}"
    if isinstance(value, int):
        return f"{policy.metric} {value}"
    return f"no {policy.metric}" if value is None else f"{policy.metric} is not a number"


def _counted(place: str, kept: int) -> str:
    return f"{place}, and {kept} {'is' if kept == 1 else 'are'} kept"


def _ordinal(place: int) -> str:
    """``""`` for the first place, ``"2nd "`` for the second, …"""
    return "" if place == 1 else f"{ordinal(place)} "
