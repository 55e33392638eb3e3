"""Shows a model's champion in MLflow's model registry. Ours stays the source of truth."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from trial_core.checkpoint import layout
from trial_core.checkpoint.json_objects import read_json
from trial_core.common.text_format import one_line
from trial_core.errors import ConfigError
from trial_core.models.registry import Registry
from trial_core.observe.trackers.in_mlflow import MlflowTracker, quiet_client
from trial_core.observe.trackers.journal import FOLDER, ORDER, State
from trial_core.observe.trackers.sender import SenderOrder
from trial_core.observe.trackers.tracker import describe

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

    from trial_core.models.records import Version

CHAMPION = "champion"
VERSION_TAG = "trialflow.version"
NOT_SHOWN = "the champion has changed, and MLflow's registry does not show it until the next change"


class NotShown(Exception):
    """MLflow's registry does not show the champion; the text says why."""


def show_champion(
    registry: Registry, model: str, own: Mapping[str, Mapping[str, Any]] | None = None
) -> str | None:
    """Make the alias ``champion`` in MLflow's registry name the model's present champion.

    This is done if the experiment that trained the champion has ``registered_model`` below
    ``mlflow``. It may be repeated: the next call completes an unfinished one.

    Args:
        own: the trackers of the caller's experiment, with their options.

    Returns:
        The version there, as ``gpt version 3``; None if the experiment does not ask for it.

    Raises:
        NotShown: MLflow cannot be reached, or refuses; or only the storage names its place, or
            another registered model.
        RegistryError, StorageError: our registry cannot be read.
    """
    champion = registry.champion(model)
    if champion is None:
        return None
    order = _stored(registry, champion.trial, ORDER, SenderOrder)
    options: dict[str, Any] = {} if order is None else order.trackers.get("mlflow", {})
    if not (name := options.get("registered_model")):
        return None
    ours = (own or {}).get("mlflow", {})
    if name is not True and name not in (model, ours.get("registered_model")):
        raise NotShown(
            f"the trial's storage names the registered model {one_line(str(name))}, which your "
            "experiment does not name; its champion would change. If you trust it, give an "
            "experiment (--config) whose trackers.mlflow has this registered_model"
        )
    state = _stored(registry, champion.trial, "mlflow.json", State) or State()
    options = MlflowTracker.without_paths(options)
    try:
        MlflowTracker.require_own_place("mlflow", options, ours)
    except ConfigError as error:  # not shortened: it says what to set
        raise NotShown(str(error)) from error
    try:
        client = quiet_client(options)
        number = _version(client, model if name is True else str(name), registry, champion, state)
    except Exception as error:  # MLflow's own, and errors of its libraries
        raise NotShown(describe(error)) from error
    return number


def _version(
    client: MlflowClient, name: str, registry: Registry, champion: Version, state: State
) -> str:
    from mlflow.exceptions import MlflowException

    with suppress(MlflowException):  # it exists already; or the next call says what is wrong
        client.create_registered_model(name)
    there = client.search_model_versions(f"name='{name}'")
    tags = {VERSION_TAG: str(champion.number), "trialflow.checkpoint": champion.checkpoint}
    found = [each for each in there if tags.items() <= each.tags.items()]
    version = found[0] if found else client.create_model_version(
        name, source=registry.store.files_url(champion.checkpoint), run_id=state.run or None,
        tags={**tags, "trialflow.trial": champion.trial}, await_creation_for=0,
    )  # fmt: skip
    client.set_registered_model_alias(name, CHAMPION, version.version)
    return f"{name} version {version.version}"


def _stored(registry: Registry, trial: str, name: str, kind: type[Any]) -> Any:
    key = layout.run_file_key(trial, f"{FOLDER}/{name}")
    return read_json(registry.store.storage, key, kind, is_silent=True)
