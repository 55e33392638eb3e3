"""`trialflow models`: the registry's models, their versions, and which of these is champion."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from trial_core import text_format
from trial_core.errors import ConfigError
from trialflow.deployments.cli import console
from trialflow.deployments.cli.experiment_options import (
    ConfigFile,
    Storage,
    open_store,
    read_experiment,
)
from trialflow.deployments.cli.tables import AsJson, local_time, print_table, shortest_unique

if TYPE_CHECKING:
    from pathlib import Path

    from trial_core.models.records import Move, Version
    from trial_core.models.registry import Registry

_READ_THREADS = 8

app = App(
    name="models",
    help="List and show the registry's models; promote a version, or go back to the one before. "
    "They are looked for where --config or --storage says, else in the folder of runs.",
)

Why = Annotated[str, Parameter(help="Why, for those who look at the model's history.")]


@app.command(name="list")
def list_(*, config: ConfigFile = None, storage: Storage = None, json_: AsJson = False) -> int:
    """List models and their champions."""
    registry = _registry(config, storage)
    models = [_model(registry, name) for name in registry.models()]
    if json_:
        print(json.dumps([model.summary() for model in models], indent=2))
    elif not models:
        print(f"no models in {registry.store.url}")
    else:
        columns = ("model", "champion", "previous", "versions", "since", "value")
        print_table(columns, [model.row() for model in models])
    return 0


@app.command
def show(
    model: str, /, *, config: ConfigFile = None, storage: Storage = None, json_: AsJson = False
) -> int:
    """Show a model: its versions, and how its champion has changed.

    Parameters
    ----------
    model
        The model's name.
    """
    registry = _registry(config, storage)
    registry.check(model)
    shown = _Model(registry, model)
    if json_:
        print(json.dumps(shown.details(), indent=2))
    else:
        shown.print()
    return 0


@app.command
def promote(
    model: str,
    version: int | None = None,
    /,
    *,
    checkpoint: Annotated[
        str | None,
        Parameter(
            help="Instead of a version: uuid of a checkpoint, or how it begins. It is made a "
            "version first, if it is none yet."
        ),
    ] = None,
    why: Why = "",
    config: ConfigFile = None,
    storage: Storage = None,
    json_: AsJson = False,
) -> int:
    """Make a version the champion, once every byte of its checkpoint has been verified.

    Parameters
    ----------
    model
        The model's name.
    version
        The version's number.
    """
    if (version is None) == (checkpoint is None):
        raise ConfigError(
            "give either the number of a version (`trialflow models show` lists them) or "
            "--checkpoint"
        )
    registry = _registry(config, storage)
    if checkpoint is not None:
        version = _register(registry, model, checkpoint, config).number
    before = registry.state(model)
    move = registry.promote(model, version or 0, why=why)
    _say(move, json_, _place(config, storage), before is None or move.number > before.number)
    return 0


@app.command
def rollback(
    model: str,
    /,
    *,
    why: Why = "",
    config: ConfigFile = None,
    storage: Storage = None,
    json_: AsJson = False,
) -> int:
    """Make the champion before this one champion again, and this one the previous.

    Parameters
    ----------
    model
        The model's name.
    """
    _say(_registry(config, storage).rollback(model, why=why), json_, _place(config, storage))
    return 0


class _Model:
    """All about a model."""

    def __init__(self, registry: Registry, name: str) -> None:
        self.name = name
        self.state = registry.state(name)
        self.versions = registry.versions(name)
        self._registry = registry

    def summary(self) -> dict[str, Any]:
        """What a program wants of a model in a list."""
        state, champion = self.state, self._champion()
        return {
            "model": self.name,
            "champion": state.champion if state else None,
            "previous": state.previous if state else None,
            "versions": len(self.versions),
            "since": state.at if state else None,
            "checkpoint": champion.checkpoint if champion else None,
        }

    def details(self) -> dict[str, Any]:
        """All of it, for a program."""
        from msgspec import to_builtins

        there, moves = self._there(), self._registry.moves(self.name)
        return {
            **self.summary(),
            "versions": [
                {
                    **to_builtins(each),
                    "alias": self._alias(each),
                    "is_deleted": each.manifest_key not in there,
                    "became": became,
                }
                for each, became in zip(self.versions, self._became(moves), strict=True)
            ],
            "moves": [to_builtins(move) for move in moves],
        }

    def row(self) -> tuple[str, ...]:
        """What a person wants of a model in a list."""
        state, champion = self.state, self._champion()
        return (
            self.name,
            str(state.champion) if state else "none",
            str(state.previous) if state and state.previous else "",
            str(len(self.versions)),
            local_time(state.at) if state else "",
            _value(champion) if champion else "",
        )

    def print(self) -> None:
        """All of it, for a person."""
        length, there = shortest_unique([each.checkpoint for each in self.versions]), self._there()
        moves = self._registry.moves(self.name)
        columns = (
            "version", "alias", "checkpoint", "trial", "batches", "registered", "value",
            "what became of it",
        )  # fmt: skip
        rows = [
            (*self._cells(each, length, there), text_format.one_line(became))
            for each, became in zip(self.versions, self._became(moves), strict=True)
        ]
        print_table(columns, rows)
        if moves:
            print()
            head = ("move", "when", "what", "champion", "previous", "by", "why")
            print_table(head, [_cells_of(move) for move in moves])

    def _there(self) -> set[str]:
        """The checkpoints that have not been deleted, by the keys of their manifests."""
        from trial_core.checkpoint.layout import MANIFESTS

        return set(self._registry.store.storage.sizes(MANIFESTS))

    def _cells(self, version: Version, length: int, there: set[str]) -> tuple[str, ...]:
        is_gone = version.manifest_key not in there
        return (
            str(version.number),
            self._alias(version) or ("deleted" if is_gone else ""),
            version.checkpoint[:length],
            version.trial,
            str(version.batches_trained),
            local_time(version.at),
            _value(version),
        )

    def _became(self, moves: list[Move]) -> list[str]:
        """Of each version, why it was promoted or was not, in words."""
        from trial_core.errors import RegistryError
        from trial_core.models.journal import Journal, PromotionDecision
        from trial_core.storage.parallel import StopSignal, in_parallel

        def became(version: Version, stop: StopSignal) -> str:
            stop.check()
            made = [move for move in moves if move.champion == version.number]
            own = next((move for move in made if move.run == version.run), None)
            if own is not None:
                return f"promoted: {own.why}" if own.why else "promoted"
            if not version.run:
                return "promoted" if made else "registered, and not promoted"
            try:
                outcome = Journal(self._registry.store, self.name, version.run).read(
                    "outcome", PromotionDecision
                )
            except RegistryError:
                return f"run {version.run} has noted what cannot be read"
            if outcome is None:
                return f"run {version.run} has not come to a decision"
            since = "; promoted since" if made and not outcome.promoted else ""
            return f"{'' if outcome.promoted else 'not '}promoted: {outcome.why}{since}"

        return in_parallel(became, self.versions, _READ_THREADS)

    def _alias(self, version: Version) -> str | None:
        return self.state.alias_of(version.number) if self.state else None

    def _champion(self) -> Version | None:
        return next((each for each in self.versions if self._alias(each) == "champion"), None)


class _Unreadable:
    """In the place of a model of whose records one was altered: the others are not to blame."""

    def __init__(self, name: str, problem: str) -> None:
        self.name = name
        self.problem = problem

    def summary(self) -> dict[str, Any]:
        """As that of a model."""
        return {"model": self.name, "problem": self.problem}

    def row(self) -> tuple[str, ...]:
        """As that of a model."""
        return (self.name, "unreadable", "", "", "", "")


def _model(registry: Registry, name: str) -> _Model | _Unreadable:
    """A model in a list; what cannot be read is said on stderr."""
    from trial_core.errors import RegistryError

    try:
        return _Model(registry, name)
    except RegistryError as error:
        console.warning(f"model {name}: {error}")
        return _Unreadable(name, str(error))


def _place(config: Path | None, storage: str | None) -> str:
    """The options that name the storage, for a command that somebody may copy."""
    given = {"--config": config, "--storage": storage}
    return "".join(
        f" {option} {shlex.quote(str(value))}" for option, value in given.items() if value
    )


def _registry(config: Path | None, storage: str | None) -> Registry:
    from trial_core.models.registry import Registry

    return Registry(open_store(config, storage))


def _register(registry: Registry, model: str, checkpoint: str, config: Path | None) -> Version:
    """Make a checkpoint a version, compared by the metric that the experiment names, else by that
    of the model's last version."""
    from trial_core.retention.policy import own_metric

    manifest = registry.store.open(checkpoint)
    versions = registry.versions(model)
    metric = versions[-1].metric if versions else None
    smaller_is_better = versions[-1].smaller_is_better if versions else True
    if config is not None:
        searcher = read_experiment(config, []).searcher
        metric, smaller_is_better = searcher.metric, searcher.smaller_is_better
    return registry.register(
        model, manifest, metric=metric, smaller_is_better=smaller_is_better,
        value=own_metric(manifest, metric) if metric else None,
    )  # fmt: skip


def _say(move: Move, as_json: bool, place: str, is_new: bool = True) -> None:
    if as_json:
        from msgspec import to_builtins

        print(json.dumps({**to_builtins(move), "is_new": is_new}, indent=2))
        return
    before = "" if move.previous is None else f"; before: version {move.previous}"
    already = "" if is_new else " already"
    print(f"version {move.champion} is champion of model {move.model}{already}{before}")
    if is_new and move.previous is not None:
        console.note(f"to go back: trialflow models rollback {move.model}{place}")


def _cells_of(move: Move) -> tuple[str, ...]:
    return (
        str(move.number),
        local_time(move.at),
        move.kind,
        str(move.champion),
        "" if move.previous is None else str(move.previous),
        f"run {move.run}" if move.run else move.by,
        text_format.one_line(move.why),
    )


def _value(version: Version) -> str:
    if version.metric is None or version.value is None:
        return ""
    return f"{version.metric} {text_format.number(version.value)}"
