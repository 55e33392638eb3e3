"""The journal of a retraining: the result of each stage, stored for later attempts.

Each record is an object in the storage, created once::

    models/{model}/retrainings/{run}/plan.json        data, champion and trial of the run
    models/{model}/retrainings/{run}/plan-01.json     a later plan with another champion
    models/{model}/retrainings/{run}/champion.json    the champion's metrics on that data
    models/{model}/retrainings/{run}/challenger.json  the challenger's best checkpoint, registered
    models/{model}/retrainings/{run}/verdict.json     result of the comparison
    models/{model}/retrainings/{run}/outcome.json     whether the challenger was promoted
    models/{model}/retrainings/{run}/told.json        the event was sent
    models/{model}/retrainings/{run}/callback-00.json a callback was called
    models/{model}/retrainings/{run}/report.md        the report

An attempt after a crash reads the journal and continues after the last record. All attempts
therefore decide alike, and only the stage that was interrupted runs again.

One plan can be replaced: while its champion is not validated, a later attempt plans with the
present champion. A rollback and a retry thus help when the champion is damaged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from trial_core.checkpoint import layout
from trial_core.checkpoint.json_objects import encode_json, parse_time
from trial_core.checkpoint.manifest import tagged, untagged, utc_now
from trial_core.checkpoint.storage.parallel import read_all
from trial_core.checkpoint.store import CheckpointStore
from trial_core.common.decoding import convert, decode
from trial_core.errors import CheckpointDamaged, RegistryError
from trial_core.models.records import Move, Version

REPORT = "report.md"


class RetrainingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of a retraining.

    Attributes:
        trial: id of the challenger's trial.
        scheduled_at, begun_at: scheduled start, and actual start of the first attempt:
            ISO 8601, UTC.
        data: the experiment's data, rendered, overridden by the data given to the run.
        champion, move: numbers of the champion version, and of the model's last move, or 0.
        renewed, note: how many earlier plans of the run this one replaces, and why, for people.
    """

    trial: str
    scheduled_at: str
    begun_at: str
    data: dict[str, Any]
    champion: int | None
    move: int
    renewed: int = 0
    note: str = ""

    @property
    def champion_record(self) -> str:
        return _renewed_name("champion", self.renewed)

    @property
    def lateness_seconds(self) -> float:
        """Time between scheduled and actual start. Raises ValueError if they cannot be compared; so
        no plan has such times."""
        begun_at, scheduled_at = parse_time(self.begun_at), parse_time(self.scheduled_at)
        if begun_at is None or scheduled_at is None:
            raise ValueError(
                "expected times in ISO 8601 with an offset, got "
                f"{self.begun_at!r} and {self.scheduled_at!r}"
            )
        return (begun_at - scheduled_at).total_seconds()

    def __post_init__(self) -> None:
        _ = self.lateness_seconds


class Champion(msgspec.Struct, frozen=True, kw_only=True):
    """The champion on the plan's data."""

    metrics: dict[str, Any]
    value: float


class Challenger(msgspec.Struct, frozen=True, kw_only=True):
    """The trained challenger.

    Attributes:
        version: its number in the registry; None if it has no checkpoint to compare, and
            `why_none` tells the reason.
        checkpoint: uuid of its best checkpoint.
        trial, trials: the best trial of the search that has found it, empty without a search; and
            how many trials the search has begun.
    """

    version: int | None = None
    checkpoint: str | None = None
    batches_trained: int = 0
    metrics: dict[str, Any] = {}
    value: float | None = None
    why_none: str = ""
    trial: str = ""
    trials: int = 0
    hyperparameters: dict[str, Any] = {}


class PromotionDecision(msgspec.Struct, frozen=True, kw_only=True):
    """The decision whether to promote the challenger (verdict), or the result (outcome)."""

    promoted: bool
    why: str


class StageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A completed stage without a result."""

    what: str
    at: str


Record = TypeVar("Record", bound=msgspec.Struct)


class Journal:
    """The journal of one retraining, whose id `run` is the same for all attempts. Every method may
    raise `StorageError`."""

    def __init__(self, store: CheckpointStore, model: str, run: str) -> None:
        self._storage = store.storage
        self._model = model
        self._run = run

    def url(self, name: str) -> str:
        return f"{self._storage.url}/{self._key(name)}"

    def read(self, name: str, kind: type[Record]) -> Record | None:
        """A record, or None if no attempt has written it. Raises RegistryError if the stored object
        is of another kind."""
        key = self._key(f"{name}.json")
        try:
            data = self._storage.read(key)
            if data is None:
                return None
            return convert(untagged(decode(data, object)), kind)
        except (msgspec.MsgspecError, RecursionError, CheckpointDamaged) as error:
            raise RegistryError(
                f"{self._storage.url}/{key} cannot be read: {error}; start a new run"
            ) from error

    def write(self, name: str, value: Record) -> Record:
        """Write a record. Returns the valid one: another attempt may have written it first."""
        data = tagged(msgspec.to_builtins(value))
        try:
            self._storage.create(self._key(f"{name}.json"), encode_json(data))
        except FileExistsError:
            return self.read(name, type(value)) or value
        return value

    def read_or_compute(
        self, name: str, kind: type[Record], compute: Callable[[], Record]
    ) -> Record:
        existing = self.read(name, kind)
        return self.write(name, compute()) if existing is None else existing

    def mark_done(self, name: str, what: str) -> None:
        self.write(name, StageRecord(what=what, at=utc_now()))

    def plan(self) -> RetrainingPlan | None:
        """The valid plan, which is the last one; None if no attempt has planned."""
        last, number = self.read("plan", RetrainingPlan), 1
        while last is not None and (
            later := self.read(_renewed_name("plan", number), RetrainingPlan)
        ):
            last, number = later, number + 1
        return last

    def write_plan(self, plan: RetrainingPlan) -> RetrainingPlan:
        return self.write(_renewed_name("plan", plan.renewed), plan)

    def write_report(self, text: str) -> None:
        """Write the report, replacing an earlier one."""
        self._storage.write(self._key(REPORT), text.encode())

    def _key(self, name: str) -> str:
        return layout.retraining_key(self._model, self._run, name)


def _renewed_name(name: str, times: int) -> str:
    return f"{name}-{times:02d}" if times else name


def explain_versions(
    store: CheckpointStore, versions: Sequence[Version], moves: Sequence[Move]
) -> list[str]:
    """What became of each version, in words, by the journals of the retrainings that registered
    them."""
    return read_all(lambda version: _explain(store, version, moves), versions)


def _explain(store: CheckpointStore, version: Version, moves: Sequence[Move]) -> str:
    promotions = [move for move in moves if move.champion == version.number]
    by_its_run = next((move for move in promotions if move.run == version.run), None)
    if by_its_run is not None:
        return f"promoted: {by_its_run.why}" if by_its_run.why else "promoted"
    if not version.run:
        return "promoted" if promotions else "registered, not promoted"
    try:
        outcome = Journal(store, version.model, version.run).read("outcome", PromotionDecision)
    except RegistryError:
        return f"the journal of run {version.run} cannot be read"
    if outcome is None:
        return f"run {version.run} has not decided"
    later = "; promoted later" if promotions and not outcome.promoted else ""
    return f"{'' if outcome.promoted else 'not '}promoted: {outcome.why}{later}"
