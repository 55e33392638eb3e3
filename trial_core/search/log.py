"""The log of a search in the storage: what has happened to it, in order. Nothing else is stored.

Records are numbered and create-only, ``searches/{search}/{number:06d}.json``. Of two drivers that
write a record of the same number, one has it, and the other ends.
"""

from __future__ import annotations

from typing import Any

from trial_core.checkpoint import layout
from trial_core.checkpoint.json_objects import user_at_host, warn_of_foreign_object
from trial_core.checkpoint.manifest import utc_now
from trial_core.checkpoint.numbered_log import NumberedEntry, NumberedLog
from trial_core.checkpoint.storage.base import Storage
from trial_core.errors import SearchError, Superseded
from trial_core.search.plan import BracketPlan


class SearchRecord(NumberedEntry, frozen=True, kw_only=True, tag_field="event"):
    """A record of a search, counted from 1 without gaps. `at`: ISO 8601, UTC."""

    search: str
    at: str
    by: str

    @property
    def owner(self) -> str:
        return self.search


class Opened(SearchRecord, frozen=True, kw_only=True, tag="opened"):
    """The search has begun, with these settings: the experiment's sections as plain data."""

    experiment: str
    searcher: dict[str, Any]
    hyperparameters: dict[str, Any]
    seed: int
    data: dict[str, Any] | None = None  # None if it is not known, as of earlier releases


class Changed(SearchRecord, frozen=True, kw_only=True, tag="changed"):
    """The search continues with other maxima: `plans` has all brackets, with these."""

    searcher: dict[str, Any]
    plans: list[BracketPlan]


class Begun(SearchRecord, frozen=True, kw_only=True, tag="begun"):
    """A trial has got its hyperparameters. `trial` is its number, from 0; `id` that of its runs."""

    trial: int
    id: str
    bracket: int
    hyperparameters: dict[str, Any]


class RungReached(SearchRecord, frozen=True, kw_only=True, tag="reached"):
    """A trial has been trained to a rung, validated there and saved.

    Attributes:
        length: the rung's, in the unit of the search's `max_length`.
        metric: the searcher metric; None if it is not a finite number.
        checkpoint: the uuid of the trial's newest checkpoint.
    """

    trial: int
    length: int
    batches: int
    metric: float | None
    checkpoint: str | None


class Exited(SearchRecord, frozen=True, kw_only=True, tag="exited"):
    """A trial has failed, or has ended itself."""

    trial: int
    why: str
    is_invalid: bool = False  # its hyperparameters cannot be trained with
    # False if it says nothing of the other trials: it has ended itself, or diverged.
    is_counted: bool = True


class NoMore(SearchRecord, frozen=True, kw_only=True, tag="no_more"):
    """The sampler had no hyperparameters for the trials that are due, and no other was trained."""


SearchEvent = Opened | Changed | Begun | RungReached | Exited | NoMore


class SearchLog:
    """The records of one search: `events` has all so far, in order. Every method may raise
    StorageError and SearchError."""

    def __init__(self, storage: Storage, search: str) -> None:
        self._search = search
        self._log: NumberedLog[SearchEvent] = NumberedLog(
            storage, search, layout.search_folder(search), SearchEvent, SearchError
        )
        self.events: list[SearchEvent] = self._log.entries()
        self._unsure: SearchEvent | None = None

    def append(self, kind: type[SearchEvent], **fields: Any) -> None:
        """Store the next record. One that an error has left unsure is stored first; it may be this.
        Raises Superseded if another driver has written a record meanwhile."""
        if (unsure := self._unsure) is not None:
            self.settle()
            if type(unsure) is kind and all(getattr(unsure, n) == fields[n] for n in fields):
                return
        self._unsure = kind(
            number=len(self.events) + 1, search=self._search, at=utc_now(), by=user_at_host(),
            **fields,
        )  # fmt: skip
        self.settle()

    def settle(self) -> None:
        """Store the record that an error of the storage has left unsure. Raises as `append`."""
        if (event := self._unsure) is None:
            return
        try:
            self._log.append(event)
        except FileExistsError:
            raise Superseded(
                f"search {self._search} is continued by another run, which has written record "
                f"{event.number}"
            ) from None
        self._unsure = None
        self.events.append(event)


def searches(storage: Storage) -> list[str]:
    """The searches in a storage that have records, sorted. Warns of foreign objects. Raises
    StorageError."""
    names: set[str] = set()
    for key in sorted(storage.sizes(layout.SEARCHES)):
        name, _, path = key.removeprefix(f"{layout.SEARCHES}/").partition("/")
        if not (path and layout.is_name(name)):
            warn_of_foreign_object(storage, key)
        elif layout.parse_numbered_key(layout.search_folder(name), key) is not None:
            names.add(name)
    return sorted(names)
