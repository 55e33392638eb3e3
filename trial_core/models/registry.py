"""The registry: which checkpoints of a storage are versions of which model, and which is champion.

It lies in the same storage as the checkpoints; see `trial_core.checkpoint.layout` for its names.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from trial_core.checkpoint import layout
from trial_core.checkpoint.json_objects import user_at_host
from trial_core.checkpoint.manifest import Manifest, utc_now
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import (
    CheckpointNotFound,
    ModelNotFound,
    PromotionConflict,
    PromotionRefused,
    RegistryError,
)
from trial_core.models.numbered_log import Entry, NumberedLog
from trial_core.models.promotion import ANY, InsteadOf, PromotionRequest, move_aliases
from trial_core.models.records import Alias, Move, Version
from trial_core.retention import holds

__all__ = ["ANY", "HeldVersion", "InsteadOf", "Registry"]

_TRIES = 100

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeldVersion:
    """Why the registry keeps a checkpoint.

    Attributes:
        version: number of the model's version that it is.
        alias: what that is called; None: nothing any more, and the next move gives it up.
    """

    model: str
    version: int
    alias: Alias | None

    def __str__(self) -> str:
        alias = f" ({self.alias})" if self.alias else ""
        return f"held by model {self.model}, version {self.version}{alias}"


class Registry:
    """The models in a store. Safe to use from several threads, processes and machines.

    Every method may raise `StorageError`, and `RegistryError` where an object of the registry's
    was altered. Nothing is cached: each answer is what is there now. Of a model that nobody has
    registered anything of, the questions say that there is nothing.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self.store = store

    def models(self) -> list[str]:
        """The names of all models that have versions."""
        keys = self.store.storage.sizes(layout.MODELS)
        names = {key.split("/")[1] for key in keys if len(key.split("/")) > 2}
        return sorted(
            name
            for name in names
            if layout.is_name(name)
            and any(key.startswith(f"{layout.versions_folder(name)}/") for key in keys)
        )

    def versions(self, model: str) -> list[Version]:
        """All versions of a model, by number."""
        return self._versions(model).entries()

    def version(self, model: str, number: int) -> Version:
        """One version of a model.

        Raises:
            ModelNotFound: there is none of that number: which there are.
        """
        found = self._versions(model).read(number)
        if found is not None:
            return found
        self.check(model)
        there = ", ".join(str(version.number) for version in self.versions(model)[-10:])
        raise ModelNotFound(f"model {model} has no version {number}; the last ones are {there}")

    def check(self, model: str) -> None:
        """Refuse a model of which nothing is registered.

        Raises:
            ModelNotFound: that is so; says which models there are.
        """
        if self._versions(model).last() is None:
            there = ", ".join(self.models()) or "none"
            raise ModelNotFound(
                f"no model in {self.store.url} is called {model!r}; there is: {there}"
            )

    def moves(self, model: str, after: int = 0) -> list[Move]:
        """All moves of a model's aliases that have higher numbers than `after`, in order."""
        return self._moves(model).entries(after)

    def state(self, model: str) -> Move | None:
        """What a model's aliases are: the last move. None: it has no champion yet."""
        return self._moves(model).last()

    def champion(self, model: str) -> Version | None:
        """The version that is champion, None where none is."""
        move = self.state(model)
        return None if move is None else self.version(model, move.champion)

    def held(self) -> dict[str, list[HeldVersion]]:
        """What the registry keeps, by the checkpoint's uuid: of each model the version once.

        A model whose moves cannot be read is warned of.
        """
        held_by_uuid = holds.holds(self.store)
        states: dict[str, Move | None] = {}
        for model in {held.model for of_one in held_by_uuid.values() for held in of_one}:
            try:
                states[model] = self.state(model)
            except RegistryError as error:
                _logger.warning("what is champion of model %s is not known: %s", model, error)

        def of(hold: holds.RegistryHold) -> HeldVersion:
            state = states.get(hold.model)
            return HeldVersion(
                hold.model, hold.version, state.alias_of(hold.version) if state else None
            )

        return {uuid: list(dict.fromkeys(map(of, of_one))) for uuid, of_one in held_by_uuid.items()}

    def register(
        self,
        model: str,
        manifest: Manifest,
        *,
        metric: str | None,
        smaller_is_better: bool,
        value: float | None,
        run: str = "",
        note: str = "",
    ) -> Version:
        """Make a checkpoint the next version of a model; the one that it is already, if it is.

        Args:
            manifest: of the checkpoint, which must be committed.
            metric, smaller_is_better, value, run, note: see `Version`.

        Raises:
            CheckpointNotFound: the checkpoint is not there.
        """
        log = self._versions(model)
        if self.store.storage.read(manifest.name.key) is None:
            raise CheckpointNotFound(
                f"checkpoint {manifest.uuid} of trial {manifest.trial} is not made a version of "
                f"model {model}: {self.store.url} has none of that name, or has it no more"
            )
        seen = 0
        for _ in range(_TRIES):
            for version in log.entries(after=seen):
                seen = version.number
                if version.checkpoint == manifest.uuid:
                    return version
            made = Version(
                number=seen + 1,
                model=model,
                checkpoint=manifest.uuid,
                trial=manifest.trial,
                experiment=manifest.experiment,
                batches_trained=manifest.progress.batches_trained,
                metric=metric,
                smaller_is_better=smaller_is_better,
                value=value if value is not None and math.isfinite(value) else None,
                at=utc_now(),
                by=user_at_host(),
                run=run,
                note=note,
            )
            try:
                log.append(made)
            except FileExistsError:
                continue  # somebody else was quicker
            return made
        raise PromotionConflict(
            f"checkpoint {manifest.uuid} cannot be made a version of model {model}: others "
            f"registered theirs {_TRIES} times while it tried, or {self.store.url}/"
            f"{layout.numbered_key(layout.versions_folder(model), seen + 1)} is half an object: "
            "then delete that"
        )

    def promote(
        self,
        model: str,
        number: int,
        *,
        run: str = "",
        why: str = "",
        instead_of: InsteadOf = ANY,
    ) -> Move:
        """Make a version the champion, and who is it now `previous`; the move that did.

        One that is champion already stays it, by the move that is there: so a run may ask again.

        Args:
            instead_of: number of the version that it was found better than, which must be the
                champion still; None: there must be no champion.
            run, why: see `Move`.

        Raises:
            ModelNotFound: there is no such version.
            CheckpointDamaged: its checkpoint differs from what was saved: which file. All of it
                is read.
            CheckpointNotFound: its checkpoint was deleted.
            PromotionConflict: somebody else has moved the aliases meanwhile: who, when, to what.
            PromotionRefused: its checkpoint is being deleted.
        """
        wish = PromotionRequest("promote", self.version(model, number), run, why, instead_of)
        return self._move(wish)

    def rollback(
        self, model: str, *, run: str = "", why: str = "", instead_of: InsteadOf = ANY
    ) -> Move:
        """Make `previous` the champion, and the champion `previous`; the move that did.

        A run that asks again gets the move that it has made, as long as that is the last.

        Args:
            instead_of: number of the version to do away with, which must be the champion still.
            run, why: see `Move`.

        Raises:
            ModelNotFound: there is no such model.
            PromotionRefused: there is no previous champion.
            CheckpointDamaged: its checkpoint differs from what was saved: which file. All of it
                is read.
            CheckpointNotFound: its checkpoint was deleted, past the registry.
            PromotionConflict: somebody else has moved the aliases meanwhile: who, when, to what.
        """
        last = self.state(model)
        if last is None:
            self.check(model)
            raise PromotionRefused(
                f"model {model} cannot be rolled back: it has no champion; promote a version"
            )
        if last.kind == "rollback" and run and last.run == run:
            return last
        if last.previous is None:
            raise PromotionRefused(
                f"model {model} cannot be rolled back: version {last.champion} is its first "
                "champion, there is no previous one; promote another version"
            )
        if instead_of is ANY:
            instead_of = last.champion
        version = self.version(model, last.previous)
        return self._move(PromotionRequest("rollback", version, run, why, instead_of))

    def _move(self, wish: PromotionRequest) -> Move:
        model = wish.version.model
        return move_aliases(self.store, self._versions(model), self._moves(model), wish)

    def _versions(self, model: str) -> NumberedLog[Version]:
        return self._log(model, layout.versions_folder(model), Version)

    def _moves(self, model: str) -> NumberedLog[Move]:
        return self._log(model, layout.moves_folder(model), Move)

    def _log(self, model: str, folder: str, kind: type[Entry]) -> NumberedLog[Entry]:
        if not layout.is_name(model):
            raise RegistryError(
                f"no model can be called {model!r}: a name is made of up to 200 letters and "
                "digits, and within them '.', '_' and '-'"
            )
        return NumberedLog(self.store.storage, folder, layout.locks_folder(model), kind)
