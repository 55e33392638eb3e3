"""Watches whether a run's losses are finite, and ends the run if they stay NaN or infinite.

A loss that stays non-finite for a whole train-workload will not recover, and a restart would lead
there again. Until the loss is finite again, no checkpoint is stored: so the last checkpoint, from
which the trial can continue, has finite losses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trial_core.common.text_format import number, plural
from trial_core.errors import NonFiniteLoss, TrialError
from trial_core.messages import NonFinite, Trained

MIN_BATCHES = 5
"""A loss that is not finite in fewer batches in a row may recover, however short workloads are."""


@dataclass
class LossWatch:
    """Follows the metrics of one launch.

    Attributes:
        is_on: True if such a loss ends the run (`stopping.fail_on_non_finite_loss`).
        since: index of the first batch from which on the losses were not finite; None if they are
            finite now. Of a script: the steps of the first such report.
        where: the loss and its value at that batch, for people.
        begin, reached: the last train-workload; of a script, its last two training reports.
    """

    is_on: bool = True
    since: int | None = None
    where: str = ""
    begin: int = 0
    reached: int = 0
    _warned: set[str] = field(default_factory=set)
    _skipped: int = 0

    def trained(
        self,
        begin: int,
        reached: int,
        metrics: Mapping[str, Any],
        ranks: Sequence[Mapping[str, NonFinite]] = (),
    ) -> list[str]:
        """Note training metrics. Returns a warning for each that is not finite for the first time.

        They are averaged over batches and ranks, or as a script has reported them. `ranks` says
        where each rank's were not finite; by default the metrics decide.
        """
        last, self.begin, self.reached = self.reached, begin, reached
        bad = {name: self._found(name, ranks) for name in _non_finite(metrics)}
        losses = _losses(metrics)
        streaks = [bad[name][1] if name in bad else None for name in losses]
        ongoing = [each for each in streaks if each is not None]
        if not losses or len(ongoing) < len(streaks):
            self.since = None
        elif self.since is None or max(ongoing) > begin or last != begin:
            self.since = max(ongoing)
            self.where = f'"{losses[0]}" is {number(metrics[losses[0]])}{bad[losses[0]][0]}'
        return [
            self._warning("training", name, f"{number(metrics[name])}{where}")
            for name, (where, _) in bad.items()
            if f"training {name}" not in self._warned
        ]

    def validated(
        self, batches_trained: int, metrics: Mapping[str, Any], searcher_metric: str | None = None
    ) -> list[str]:
        """Note validation metrics. Returns warnings, as `trained`."""
        effect = "; such a validation never counts as the best"
        return [
            self._warning(
                "validation", name,
                f"{number(metrics[name])} at batch {batches_trained}"
                f"{effect if name == searcher_metric else ''}",
            )
            for name in _non_finite(metrics)
            if f"validation {name}" not in self._warned
        ]  # fmt: skip

    def stepped(self, trained: Trained) -> list[str]:
        """Note the steps of a workload. Returns a warning, once, if a scaler skips them all."""
        steps, skipped = trained.scaled_steps, trained.skipped_steps
        self._skipped = self._skipped + skipped if steps and skipped == steps else 0
        if self._skipped < MIN_BATCHES or "steps" in self._warned:
            return []
        self._warned.add("steps")
        return [
            f"the loss scaler has skipped the last {plural(self._skipped, 'optimizer step')}, all "
            f"until batch {trained.batches_trained}, because gradients were not finite: the "
            "weights do not change; train in bfloat16, or begin a new trial with a lower learning "
            "rate"
        ]

    def withholds_checkpoint(self, is_last: bool) -> bool:
        """Return whether the trial could not continue from a checkpoint saved now.

        If training ends here (`is_last`), a loss may be excused once.
        """
        return self.is_on and self.since is not None and not (is_last and self._is_short)

    def failure(self, is_last: bool, saved_at: int | None) -> TrialError | None:
        """Return the error, if the run must end because of its losses.

        `is_last`: training ends here in any case. `saved_at`: batches trained at the last
        checkpoint.
        """
        if not self.is_on or self.since is None or self._is_short:
            return None
        if self.since > self.begin and not is_last:  # not yet for a whole workload
            return None
        last = "so there is none" if saved_at is None else f"the last one is at batch {saved_at}"
        return NonFiniteLoss(
            f"the loss is not finite since batch {self.since} ({self.where}), until batch "
            f"{self.reached}; no checkpoint was stored since then, {last}. It would come again: "
            "change what causes it, in the trial's code or the data of that batch, before the "
            "trial continues; a lower learning rate needs a new trial with a checkpoint's weights "
            "(searcher.source_weights_only=true); stopping.fail_on_non_finite_loss=false trains on"
        )

    @property
    def _is_short(self) -> bool:
        return self.since is not None and self.reached - self.since < MIN_BATCHES

    def _found(self, name: str, ranks: Sequence[Mapping[str, NonFinite]]) -> tuple[str, int | None]:
        """Return where a metric first was not finite, for people; and since when until the end."""
        seen = [(each[name], rank) for rank, each in enumerate(ranks) if name in each]
        if not seen:  # a script's, or a custom reducer's
            return f" at batch {self.reached}", self.reached if self.since is None else self.begin
        first, rank = min((found.first, rank) for found, rank in seen)
        streaks = [found.since for found, _ in seen if found.since is not None]
        return f" in batch {first} on rank {rank}", min(streaks, default=None)

    def _warning(self, kind: str, name: str, seen: str) -> str:
        self._warned.add(f"{kind} {name}")
        return f'{kind} metric "{name}" is {seen} (warned of once)'


def _floats(value: Any) -> Iterator[float]:
    """Yield a number, or the numbers in nested lists."""
    if isinstance(value, float):
        yield value
    for each in value if isinstance(value, list) else ():
        yield from _floats(each)


def _non_finite(metrics: Mapping[str, Any]) -> list[str]:
    return [name for name, each in metrics.items() if not all(map(math.isfinite, _floats(each)))]


def _losses(metrics: Mapping[str, Any]) -> list[str]:
    """Return the metrics by which training has failed if none of them is finite."""
    numbers = [name for name, each in metrics.items() if any(True for _ in _floats(each))]
    if "loss" in numbers:
        return ["loss"]
    return [name for name in numbers if "loss" in name.lower()] or numbers
