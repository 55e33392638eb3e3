"""`trialflow models`: list and show models; promote a version, or roll back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from trial_core.common import text_format
from trial_core.errors import ConfigError, RegistryError, TrialflowError
from trialflow.deployments.cli import console
from trialflow.deployments.cli.deploy import configured_client
from trialflow.deployments.cli.experiment_options import HERE, StoragePlace, read_any_experiment
from trialflow.deployments.cli.json_output import AsJson, print_json
from trialflow.deployments.cli.search import kept_best, named_view
from trialflow.deployments.cli.tables import local_time, print_table, shortest_unique
from trialflow.deployments.cli.waiting import waiting

if TYPE_CHECKING:
    from trial_core.checkpoint.store import CheckpointStore
    from trial_core.models.records import Move, Version
    from trial_core.models.registry import Registry

app = App(
    name="models",
    help="List and show the models of the registry; promote a version, or roll back. The registry "
    "is in the storage of --config or --storage; by default, of ./experiment.yaml, else in "
    "./trialflow-runs/checkpoints.",
)

_LIST_COLUMNS = ("model", "champion", "previous", "versions", "since", "value")
_VERSION_COLUMNS = (
    "version", "alias", "checkpoint", "trial", "batches", "registered", "value", "outcome",
)  # fmt: skip
_MOVE_COLUMNS = ("move", "when", "what", "champion", "previous", "by", "why")

ModelName = Annotated[str, Parameter(help="The model's name.")]
Why = Annotated[str, Parameter(help="Reason, shown in the model's history. Default: none.")]


@app.command(name="list")
def list_(*, place: StoragePlace = HERE, json_: AsJson = False) -> None:
    """List models and their champions."""
    registry = _registry(place)
    with waiting(f"reading {registry.store.url}"):
        models = [_listed(registry, name) for name in registry.models()]
    if json_:
        print_json("models list", {"models": [summary for summary, _ in models]})
    elif not models:
        print(f"no models in {registry.store.url}")
    else:
        print_table(_LIST_COLUMNS, [row for _, row in models])


@app.command
def show(model: ModelName, /, *, place: StoragePlace = HERE, json_: AsJson = False) -> None:
    """Show the versions of a model, and how its champion has changed."""
    registry = _registry(place)
    with waiting(f"reading {registry.store.url}"):
        registry.check_exists(model)
        view = ModelView(registry, model)
    if json_:
        print_json("models show", view.details())
    else:
        view.print()


@app.command
def promote(
    model: ModelName,
    version: int | None = None,
    /,
    *,
    checkpoint: str | None = None,
    search: str | None = None,
    why: Why = "",
    place: StoragePlace = HERE,
    json_: AsJson = False,
) -> None:
    """Make a version the champion, after verifying every byte of its checkpoint.

    Args:
        version: The version's number. Required unless --checkpoint or --search is given.
        checkpoint: Instead of a version: uuid of a checkpoint, its first characters, or a version
            of another model, for example champion:gpt. A checkpoint that is no version of this
            model yet is registered first. Default: none.
        search: Instead of a version: a search, as `trialflow search list` names it, or its first
            characters. The checkpoint of its best result is registered. Default: none.
    """
    registry = _registry(place)
    is_one_given = [version, checkpoint, search].count(None) == 2
    metric: tuple[str | None, bool] | None = None
    if search is not None and is_one_given:
        checkpoint, metric, best = _best_of(registry.store, search)
        why = why or best
    if checkpoint is not None and is_one_given:
        with waiting(f"registering {checkpoint}"):
            metric = metric or _metric(registry, model, place)
            number = _register(registry, model, checkpoint, *metric).number
    elif version is not None and is_one_given:
        number = version
    else:
        raise ConfigError(
            "give one of: the number of a version (`trialflow models show` lists them), "
            "--checkpoint, --search"
        )
    with waiting(f"verifying version {number} of model {model}"):
        before = registry.last_move(model)
        move = registry.promote(model, number, why=why)
    is_new = before is None or move.number > before.number
    if is_new:
        _tell_server(registry, move, place.trackers())
    _print_move("models promote", move, is_new, json_, place)


@app.command
def rollback(
    model: ModelName, /, *, why: Why = "", place: StoragePlace = HERE, json_: AsJson = False
) -> None:
    """Make the previous champion the champion again."""
    registry = _registry(place)
    with waiting(f"verifying the previous champion of model {model}"):
        move = registry.rollback(model, why=why)
    _tell_server(registry, move, place.trackers())
    _print_move("models rollback", move, True, json_, place)


def _registry(place: StoragePlace) -> Registry:
    from trial_core.models.registry import Registry

    return Registry(place.open_store())


def _best_of(store: CheckpointStore, search: str) -> tuple[str, tuple[str, bool], str]:
    """The checkpoint of a search's best result; its metric, and is smaller better; the reason.

    Raises:
        ConfigError: there is none.
    """
    view = named_view(store, search)
    if (manifest := kept_best(store, view)) is None:
        raise ConfigError(
            f"search {view.id} has no result yet whose checkpoint can be promoted; --checkpoint "
            "promotes any checkpoint"
        )
    trial, result, metric = view.ranked[0]
    why = f"the best of search {view.id}: trial {trial.number}, {view.metric} {metric:g}"
    if manifest.uuid != result.checkpoint:
        why += f", and better at batch {manifest.progress.batches_trained}, which was kept"
    return manifest.uuid, (view.metric, view.sign > 0), why


def _metric(registry: Registry, model: str, place: StoragePlace) -> tuple[str | None, bool]:
    """The metric of --config, of the model, or of ./experiment.yaml; is smaller better?"""
    versions = registry.versions(model)
    if place.config is None and versions:
        return versions[-1].metric, versions[-1].smaller_is_better
    if (experiment := place.experiment) is not None:
        searcher = read_any_experiment(experiment).searcher
        return searcher.metric, searcher.smaller_is_better
    return None, True


def _register(
    registry: Registry, model: str, checkpoint: str, metric: str | None, smaller_is_better: bool
) -> Version:
    from trial_core.checkpoint.retention_policy import own_metric
    from trial_core.models.checkpoint_reference import open_checkpoint

    manifest = open_checkpoint(registry.store, checkpoint)
    return registry.register(
        model, manifest, metric=metric, smaller_is_better=smaller_is_better,
        value=own_metric(manifest, metric) if metric else None,
    )  # fmt: skip


def _tell_server(registry: Registry, move: Move, trackers: dict[str, dict[str, Any]]) -> None:
    """Report a move to the Prefect server, if there is one, and to MLflow. It is made already."""
    from trial_core.observe.trackers.model_registry import NOT_SHOWN, NotShown, show_champion

    try:
        with waiting("asking MLflow's registry"):
            show_champion(registry, move.model, trackers)
    except (NotShown, TrialflowError) as error:
        console.warning(f"{NOT_SHOWN}: {error}")
    from trialflow.flows.server.prefect_settings import prepare_prefect

    prepare_prefect()
    from trialflow.tasks.events import champion_event, send

    try:
        with configured_client() as client, waiting("asking the Prefect server"):
            send(client, champion_event(registry, move))
    except ConfigError:
        return  # no server is configured
    except TrialflowError as error:
        console.warning(f"the champion has changed, and no event tells of it: {error}")


def _print_move(command: str, move: Move, is_new: bool, as_json: bool, place: StoragePlace) -> None:
    if as_json:
        from msgspec import to_builtins

        print_json(command, {**to_builtins(move), "is_new": is_new})
        return
    before = "" if move.previous is None else f"; before: version {move.previous}"
    already = "" if is_new else " already"
    print(f"version {move.champion} is champion of model {move.model}{already}{before}")
    if is_new and move.previous is not None:
        console.note(f"to roll back: trialflow models rollback {move.model}{place.options}")


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
            _metric_text(champion) if champion else "",
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
                    _metric_text(version),
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


def _listed(registry: Registry, name: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a model in a list, as JSON and as a row of `_LIST_COLUMNS`.

    One with an altered record is a warning: the other models are still listed.
    """
    try:
        view = ModelView(registry, name)
    except RegistryError as error:
        console.warning(f"model {name}: {error}")
        return {"model": name, "problem": str(error)}, (name, "unreadable", "", "", "", "")
    return view.summary(), view.list_row()


def _metric_text(version: Version) -> str:
    if version.metric is None or version.value is None:
        return ""
    return f"{version.metric} {text_format.number(version.value)}"
