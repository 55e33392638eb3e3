"""The registry: versions of models and their champions, stored next to the checkpoints.

Key names are in `trial_core.checkpoint.layout`.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from trial_core.checkpoint import layout
from trial_core.checkpoint.json_objects import user_at_host, warn_of_foreign_object
from trial_core.checkpoint.manifest import Manifest, utc_now
from trial_core.checkpoint.numbered_log import NumberedLog
from trial_core.checkpoint.retention.protections import Protection, protections
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import (
    CheckpointNotFound,
    ModelNotFound,
    PromotionConflict,
    PromotionRefused,
    RegistryError,
)
from trial_core.models.promotion import ANY, ExpectedChampion, PromotionRequest, move_aliases
from trial_core.models.records import Alias, Move, Version

__all__ = ["ANY", "ExpectedChampion", "HeldVersion", "Registry"]

_REGISTER_ATTEMPTS = 100

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeldVersion:
    """The version for which the registry holds a checkpoint. Without an alias, the next move
    removes the hold."""

    model: str
    version: int
    alias: Alias | None

    def __str__(self) -> str:
        alias = f" ({self.alias})" if self.alias else ""
        return f"held by model {self.model}, version {self.version}{alias}"


class Registry:
    """The models in a store. Safe to use from several threads, processes and machines.

    Every method may raise `StorageError`, and `RegistryError` if a stored object was altered.
    Nothing is cached. Read methods return empty results for an unknown model.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self.store = store

    def models(self) -> list[str]:
        """All models with versions, sorted."""
        keys = self.store.storage.sizes(layout.MODELS)
        names: set[str] = set()
        foreign: set[str] = set()
        for key in keys:
            name, _, path = key.removeprefix(f"{layout.MODELS}/").partition("/")
            (names if path and layout.is_name(name) else foreign).add(name)
        for name in sorted(foreign):
            warn_of_foreign_object(self.store.storage, f"{layout.MODELS}/{name}")
        return sorted(
            name
            for name in names
            if any(key.startswith(f"{layout.versions_folder(name)}/") for key in keys)
        )

    def versions(self, model: str) -> list[Version]:
        """All versions of a model, by number."""
        return self._versions(model).entries()

    def version(self, model: str, number: int) -> Version:
        """One version of a model. Raises ModelNotFound, which lists the last ones."""
        found = self._versions(model).read(number)
        if found is not None:
            return found
        self.check_exists(model)
        existing = ", ".join(str(version.number) for version in self.versions(model)[-10:])
        raise ModelNotFound(f"model {model} has no version {number}; its last ones: {existing}")

    def check_exists(self, model: str) -> None:
        """Check that a model has versions. Raises ModelNotFound, which lists the models."""
        if self._versions(model).last() is None:
            existing = ", ".join(self.models()) or "none"
            raise ModelNotFound(
                f"there is no model {model!r} in {self.store.url}; models there: {existing}"
            )

    def moves(self, model: str, after: int = 0) -> list[Move]:
        """The moves of a model's aliases with numbers above `after`, in order."""
        return self._moves(model).entries(after)

    def last_move(self, model: str) -> Move | None:
        """The last move, which holds the current aliases; None without a champion."""
        return self._moves(model).last()

    def champion(self, model: str) -> Version | None:
        move = self.last_move(model)
        return None if move is None else self.version(model, move.champion)

    def held(self) -> dict[str, list[HeldVersion]]:
        """The versions for which the registry holds checkpoints, by checkpoint uuid. Logs a warning
        for a model whose moves cannot be read."""
        held_by_uuid = protections(self.store, kind="hold")
        moves: dict[str, Move | None] = {}
        for model in {hold.model for holds in held_by_uuid.values() for hold in holds}:
            try:
                moves[model] = self.last_move(model)
            except RegistryError as error:
                _logger.warning("cannot read the champion of model %s: %s", model, error)

        def held_version(hold: Protection) -> HeldVersion:
            move = moves.get(hold.model)
            alias = move.alias_of(hold.version) if move else None
            return HeldVersion(hold.model, hold.version, alias)

        return {
            uuid: list(dict.fromkeys(map(held_version, holds)))
            for uuid, holds in held_by_uuid.items()
        }

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
        """Make a checkpoint the next version of a model, unless it is a version already. For the
        fields, see `Version`. Raises CheckpointNotFound if the checkpoint does not exist,
        PromotionConflict if other processes took every number that was tried."""
        log = self._versions(model)
        if not self.store.storage.exists(manifest.name.key):
            raise CheckpointNotFound(
                f"checkpoint {manifest.uuid} of trial {manifest.trial} cannot become a version of "
                f"model {model}: it does not exist in {self.store.url}, or was deleted"
            )
        last_number = 0
        for _ in range(_REGISTER_ATTEMPTS):
            for existing in log.entries(after=last_number):
                last_number = existing.number
                if existing.checkpoint == manifest.uuid:
                    return existing
            version = Version(
                number=last_number + 1,
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
                log.append(version)
            except FileExistsError:
                continue  # another process registered a version first
            return version
        raise PromotionConflict(
            f"checkpoint {manifest.uuid} did not become a version of model {model} in "
            f"{_REGISTER_ATTEMPTS} attempts: other processes register versions at the same time; "
            "try again"
        )

    def promote(
        self,
        model: str,
        number: int,
        *,
        run: str = "",
        why: str = "",
        expected_champion: ExpectedChampion = ANY,
    ) -> Move:
        """Make a version the champion, and the present champion `previous`. Returns the move.

        Promoting the champion changes nothing and returns the existing move, so a run may retry.

        Args:
            expected_champion: number of the version it was compared with, which must still be
                champion; None: there must be no champion.
            run, why: see `Move`.

        Raises:
            ModelNotFound: the model has no such version.
            CheckpointDamaged: its checkpoint is damaged (every byte is verified).
            CheckpointNotFound: its checkpoint was deleted.
            PromotionConflict: the champion is another one than expected; says who moved it.
            PromotionRefused: its checkpoint is being deleted.
        """
        version = self.version(model, number)
        return self._move(PromotionRequest("promote", version, run, why, expected_champion))

    def rollback(
        self, model: str, *, run: str = "", why: str = "", expected_champion: ExpectedChampion = ANY
    ) -> Move:
        """Swap `previous` and champion. Returns the move.

        A run that retries gets its own move, if that is still the last one.

        Args:
            expected_champion: number of the version to replace, which must still be champion.
            run, why: see `Move`.

        Raises:
            ModelNotFound: the model does not exist.
            PromotionRefused: the model has no previous champion.
            CheckpointDamaged: its checkpoint is damaged (every byte is verified).
            CheckpointNotFound: its checkpoint was deleted by other means than a prune.
            PromotionConflict: another process moved the aliases first; says which.
        """
        last = self.last_move(model)
        if last is None:
            self.check_exists(model)
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
        if expected_champion == ANY:
            expected_champion = last.champion
        version = self.version(model, last.previous)
        return self._move(PromotionRequest("rollback", version, run, why, expected_champion))

    def _move(self, request: PromotionRequest) -> Move:
        model = request.version.model
        return move_aliases(self.store, self._versions(model), self._moves(model), request)

    def _versions(self, model: str) -> NumberedLog[Version]:
        return NumberedLog(self.store.storage, model, layout.versions_folder(model), Version)

    def _moves(self, model: str) -> NumberedLog[Move]:
        return NumberedLog(self.store.storage, model, layout.moves_folder(model), Move)
