"""What a retraining has come to, stage by stage, written down for the attempts after it.

Each stage's result is an object in the storage, created once::

    models/{model}/retrainings/{run}/plan.json        what is done with which data
    models/{model}/retrainings/{run}/plan-01.json     the same against another champion (below)
    models/{model}/retrainings/{run}/champion.json    the champion's metrics on that data
    models/{model}/retrainings/{run}/challenger.json  the challenger's best checkpoint, registered
    models/{model}/retrainings/{run}/verdict.json     which of both is better
    models/{model}/retrainings/{run}/outcome.json     whether the alias was moved
    models/{model}/retrainings/{run}/told.json        that the event was sent
    models/{model}/retrainings/{run}/callback-00.json that a callback was called
    models/{model}/retrainings/{run}/report.md        all of it, for people

An attempt that was killed is followed by one that reads what is there and goes on behind it. So all
attempts decide alike, whatever has become of the model meanwhile, and no stage is gone through
twice but for the one in which the attempt was killed.

One thing can make a plan useless: its champion cannot be validated, and a person has gone back to
another. Before a champion was validated, a later attempt renews the plan against that of then.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeVar

import msgspec

from trial_core.checkpoint import layout
from trial_core.checkpoint.manifest import is_json, tagged, untagged, utc_now
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import RegistryError

REPORT = "report.md"


class RetrainingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a retraining does.

    Attributes:
        trial: the challenger's trial.
        scheduled_at: when the run was to begin: ISO 8601, UTC.
        begun_at: when its first attempt began.
        data: the experiment's, rendered for that time, with what the run was given over it.
        champion: number of the version that the challenger is compared with; None: there is none.
        move: number of the last move of the model's aliases; 0: there was none.
        renewed: how many plans of the run it takes the place of.
        note: why it does, for people.
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
    def champion_note(self) -> str:
        """The note of how this plan's champion does."""
        return _renewed("champion", self.renewed)

    @property
    def lateness_seconds(self) -> float:
        """How long after its scheduled time it began."""
        return (moment(self.begun_at) - moment(self.scheduled_at)).total_seconds()


class Champion(msgspec.Struct, frozen=True, kw_only=True):
    """How the champion does on the plan's data.

    Attributes:
        metrics: of its validation.
        value: of the searcher's metric.
    """

    metrics: dict[str, Any]
    value: float


class Challenger(msgspec.Struct, frozen=True, kw_only=True):
    """What was trained.

    Attributes:
        version: its number in the registry; None: it has no checkpoint that can be compared.
        checkpoint: uuid of its best checkpoint.
        batches_trained: of that.
        metrics: of that one's validation.
        value: of the searcher's metric.
        why_none: why there is no version.
    """

    version: int | None = None
    checkpoint: str | None = None
    batches_trained: int = 0
    metrics: dict[str, Any] = {}
    value: float | None = None
    why_none: str = ""


class PromotionDecision(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the challenger takes the champion's place: what is to be done, or was.

    Attributes:
        promoted: whether it does, or did.
        why: in words.
    """

    promoted: bool
    why: str


class StageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """That something was done.

    Attributes:
        what: in words.
        at: when: ISO 8601, UTC.
    """

    what: str
    at: str


Kind = TypeVar("Kind", bound=msgspec.Struct)


class Journal:
    """The results of one retraining's stages. Every method may raise `StorageError`.

    Args:
        run: the retraining's id; the same over all attempts.
    """

    def __init__(self, store: CheckpointStore, model: str, run: str) -> None:
        self._storage = store.storage
        self._model = model
        self._run = run

    def url(self, name: str) -> str:
        """Where an object is, for people to read."""
        return f"{self._storage.url}/{self._key(name)}"

    def read(self, name: str, kind: type[Kind]) -> Kind | None:
        """What an attempt has noted, None where none has.

        Raises:
            RegistryError: something else is there.
        """
        key = self._key(f"{name}.json")
        data = self._storage.read(key)
        if data is None or not is_json(data):  # whoever wrote half of it has died
            return None
        try:
            return msgspec.convert(untagged(msgspec.json.decode(data)), type=kind)
        except msgspec.MsgspecError as error:
            raise RegistryError(
                f"{self._storage.url}/{key} cannot be read: {error}; begin a new run"
            ) from error

    def plan(self) -> RetrainingPlan | None:
        """The plan that holds: the last one, if an attempt has made any."""
        last, number = self.read("plan", RetrainingPlan), 1
        while last is not None and (later := self.read(_renewed("plan", number), RetrainingPlan)):
            last, number = later, number + 1
        return last

    def renew(self, plan: RetrainingPlan) -> RetrainingPlan:
        """Note a plan that takes the place of the one before; what counts: see `note`."""
        return self.note(_renewed("plan", plan.renewed), plan)

    def note(self, name: str, value: Kind) -> Kind:
        """Note a stage's result; what counts: that of another attempt, if it was there before."""
        stored = msgspec.json.encode(tagged(msgspec.to_builtins(value)))
        data = msgspec.json.format(stored, indent=2) + b"\n"
        try:
            self._storage.create(self._key(f"{name}.json"), data)
        except FileExistsError:
            return self.read(name, type(value)) or value
        return value

    def once(self, name: str, kind: type[Kind], work: Callable[[], Kind]) -> Kind:
        """A stage's result: as an attempt has noted it, else what `work` returns, noted."""
        known = self.read(name, kind)
        return self.note(name, work()) if known is None else known

    def done(self, name: str, what: str) -> None:
        """Note that something was done."""
        self.note(name, StageRecord(what=what, at=utc_now()))

    def write_report(self, text: str) -> None:
        """Write the report, over an earlier one."""
        self._storage.write(self._key(REPORT), text.encode())

    def _key(self, name: str) -> str:
        return layout.retraining_key(self._model, self._run, name)


def _renewed(name: str, times: int) -> str:
    return f"{name}-{times:02d}" if times else name


def moment(at: str) -> datetime:
    """A time as it is noted."""
    # Python 3.10 does not read the Z.
    return datetime.fromisoformat(at.replace("Z", "+00:00"))
