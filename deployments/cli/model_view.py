"""A model of the registry as table rows and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trial_core.common import text_format
from trialflow.deployments.cli import console
from trialflow.deployments.cli.tables import local_time, print_table, shortest_unique

if TYPE_CHECKING:
    from trial_core.models.records import Move, Version
    from trial_core.models.registry import Registry

LIST_COLUMNS = ("model", "champion", "previous", "versions", "since", "value")
_VERSION_COLUMNS = (
    "version", "alias", "checkpoint", "trial", "batches", "registered", "value", "outcome",
)  # fmt: skip
_MOVE_COLUMNS = ("move", "when", "what", "champion", "previous", "by", "why")


class ModelView:
    """A model with its versions and aliases."""

    def __init__(self, registry: Registry, name: str) -> None:
        self._registry = registry
        self._name = name
        self._last_move = registry.last_move(name)
        self._versions = registry.versions(name)

    def summary(self) -> dict[str, Any]:
        move, champion = self._last_move, self._champion()
        return {
            "model": self._name,
            "champion": move.champion if move else None,
            "previous": move.previous if move else None,
            "versions": len(self._versions),
            "since": move.at if move else None,
            "checkpoint": champion.checkpoint if champion else None,
        }

    def list_row(self) -> tuple[str, ...]:
        move, champion = self._last_move, self._champion()
        return (
            self._name,
            str(move.champion) if move else "none",
            str(move.previous) if move and move.previous else "",
            str(len(self._versions)),
            local_time(move.at) if move else "",
            _metric(champion) if champion else "",
        )

    def details(self) -> dict[str, Any]:
        from msgspec import to_builtins

        manifest_keys, moves = self._manifest_keys(), self._registry.moves(self._name)
        return {
            **self.summary(),
            "versions": [
                {
                    **to_builtins(version),
                    "alias": self._alias(version),
                    "is_deleted": version.manifest_key not in manifest_keys,
                    "became": outcome,
                }
                for version, outcome in self._with_outcomes(moves)
            ],
            "moves": [to_builtins(move) for move in moves],
        }

    def print(self) -> None:
        length = shortest_unique([each.checkpoint for each in self._versions])
        manifest_keys, moves = self._manifest_keys(), self._registry.moves(self._name)
        rows = []
        for version, outcome in self._with_outcomes(moves):
            deleted = "" if version.manifest_key in manifest_keys else "deleted"
            rows.append(
                (
                    str(version.number),
                    self._alias(version) or deleted,
                    version.checkpoint[:length],
                    version.trial,
                    str(version.batches_trained),
                    local_time(version.at),
                    _metric(version),
                    text_format.one_line(outcome),
                )
            )
        print_table(_VERSION_COLUMNS, rows)
        if moves:
            print()
            of_moves = [
                (
                    str(move.number),
                    local_time(move.at),
                    move.kind,
                    str(move.champion),
                    "" if move.previous is None else str(move.previous),
                    f"run {move.run}" if move.run else move.by,
                    text_format.one_line(move.why),
                )
                for move in moves
            ]
            print_table(_MOVE_COLUMNS, of_moves)

    def _with_outcomes(self, moves: list[Move]) -> list[tuple[Version, str]]:
        from trial_core.models.journal import explain_versions

        outcomes = explain_versions(self._registry.store, self._versions, moves)
        return list(zip(self._versions, outcomes, strict=True))

    def _manifest_keys(self) -> set[str]:
        """The manifests of all checkpoints that are not deleted."""
        from trial_core.checkpoint.layout import MANIFESTS

        return set(self._registry.store.storage.sizes(MANIFESTS))

    def _alias(self, version: Version) -> str | None:
        return self._last_move.alias_of(version.number) if self._last_move else None

    def _champion(self) -> Version | None:
        return next((each for each in self._versions if self._alias(each) == "champion"), None)


def listed(registry: Registry, name: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a model in a list, as JSON and as a row of `LIST_COLUMNS`.

    One with an altered record is a warning: the other models are still listed.
    """
    from trial_core.errors import RegistryError

    try:
        view = ModelView(registry, name)
    except RegistryError as error:
        console.warning(f"model {name}: {error}")
        return {"model": name, "problem": str(error)}, (name, "unreadable", "", "", "", "")
    return view.summary(), view.list_row()


def _metric(version: Version) -> str:
    if version.metric is None or version.value is None:
        return ""
    return f"{version.metric} {text_format.number(version.value)}"
