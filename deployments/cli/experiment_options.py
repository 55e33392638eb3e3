"""Reading the experiment and the storage that a command names; `trialflow config`."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trial_core.errors import ConfigError
from trialflow.deployments.cli import console

if TYPE_CHECKING:
    from trial_core.checkpoint.store import CheckpointStore
    from trial_core.config import ExperimentConfig, StorageConfig

Overrides = Annotated[
    list[str] | None,
    Parameter(
        name="--set",
        metavar="KEY=VALUE",
        negative=(),
        help="Set a field of the experiment: --set searcher.max_length.batches=20. "
        "The value is YAML. May be given several times.",
    ),
]
Storage = Annotated[
    str | None,
    Parameter(help="Where checkpoints are: a folder, or a URL such as s3://bucket/prefix."),
]
ConfigFile = Annotated[
    Path | None,
    Parameter(name="--config", help="The experiment file that says where checkpoints are."),
]


def config(config: Path, /, *, set_: Overrides = None, storage: Storage = None) -> int:
    """Print an experiment, checked and complete, as parameters for a deployment's run.

    For example: prefect deployment run train/train --params "$(trialflow config experiment.yaml)".
    Credentials that the experiment holds are printed too.

    Parameters
    ----------
    config
        The experiment file (YAML).
    """
    experiment = read_experiment(config, set_ or [], storage)
    print(json.dumps({"config": experiment.model_dump(mode="json")}, indent=2))
    return 0


def read_experiment(
    path: Path, overrides: list[str], storage: str | None = None
) -> ExperimentConfig:
    """The experiment that a command names; what is ignored in it is said on stderr.

    Raises:
        ConfigError: everything that is wrong, one line each.
    """
    from trial_core.config import IgnoredFieldWarning, load_config

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", IgnoredFieldWarning)
        try:
            experiment = load_config(path, overrides)
        finally:
            for ignored in caught:
                console.warning(f"{path}: {ignored.message}")
    if storage is None:
        return experiment
    place = moved(experiment.checkpoint_storage, storage)
    return experiment.model_copy(update={"checkpoint_storage": place})


def open_store(config_file: Path | None, storage: str | None) -> CheckpointStore:
    """The storage that a command names: by an experiment, by its URL, or the default one."""
    from trial_core.checkpoint.store import CheckpointStore
    from trial_core.config import StorageConfig

    if config_file is not None:
        place = read_experiment(config_file, [], storage).checkpoint_storage
    elif storage is not None:
        place = moved(StorageConfig(), storage)
    else:
        place = StorageConfig()
    return CheckpointStore(place.url, place.options)


def moved(place: StorageConfig, url: str) -> StorageConfig:
    """The storage at `url`, with the same rules for what stays there. Options, credentials among
    them, are kept for the same kind only.

    Raises:
        ConfigError: `url` is none.
    """
    from pydantic import ValidationError

    from trial_core.config import StorageConfig, error_lines

    given: dict[str, Any] = place.model_dump(exclude={"url", "options"}, exclude_none=True)
    given["url"] = url
    if _scheme(url) == _scheme(place.url):
        given["options"] = place.options
    try:
        return StorageConfig.model_validate(given)
    except ValidationError as error:
        lines = [line.removeprefix("url: ") for line in error_lines(error)]
        raise ConfigError("\n".join(f"--storage: {line}" for line in lines)) from None


def _scheme(url: str) -> str:
    scheme, separator, _ = url.partition("://")
    return scheme.lower() if separator else "file"
