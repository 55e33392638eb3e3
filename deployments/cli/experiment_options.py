"""Options of several commands: the experiment, its overrides and the storage."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from cyclopts import Parameter

from trial_core.errors import ConfigError
from trialflow.deployments.cli import console
from trialflow.deployments.cli.waiting import waiting

E = TypeVar("E", bound="ExperimentConfig")

if TYPE_CHECKING:
    from trial_core.checkpoint.store import CheckpointStore
    from trial_core.config import ExperimentConfig, StorageConfig

DEFAULT_EXPERIMENT = Path("experiment.yaml")
"""The experiment of commands that are not given one."""

STORAGE_SECONDS = 15.0
"""How long a command looks at its storage before it starts anything."""

Engine = Literal["auto", "local", "join", "ray", "slurm"]

CHECKPOINT = (
    "The checkpoint: its uuid or the first characters of it; best (by searcher.metric) or latest "
    "of the experiment's newest trial, best:TRIAL or latest:TRIAL of another; or a version in the "
    "registry: champion:MODEL, previous:MODEL or MODEL:VERSION, for example champion:gpt."
)

Experiment = Annotated[Path, Parameter(help="The experiment file (YAML).")]
Overrides = Annotated[
    list[str] | None,
    Parameter(
        name="--set",
        help="Set a field of the experiment, for example --set searcher.max_length.batches=20. "
        "The value is YAML. May be repeated. Default: the file as it is.",
    ),
]
TrialId = Annotated[str, Parameter(help="The trial's id, or the first characters of it.")]
CheckpointOption = Annotated[str, Parameter(help=CHECKPOINT)]
Checkpoints = Annotated[str, Parameter(help=CHECKPOINT, required=True)]


@Parameter(name="*")
@dataclass(frozen=True)
class Changes:
    """What a command changes in the experiment that it reads.

    Attributes:
        storage: Where checkpoints are stored: a folder, or a URL such as s3://bucket/prefix.
            Default: checkpoint_storage of the experiment, else ./trialflow-runs/checkpoints.
    """

    set_: Overrides = None
    storage: str | None = None

    @property
    def overrides(self) -> list[str]:
        return [*(self.set_ or [])]

    @property
    def moves_storage(self) -> bool:
        """True if the experiment's storage may not be that of its file."""
        is_set = any(each.startswith("checkpoint_storage") for each in self.overrides)
        return is_set or self.storage is not None

    def place(self, config: Path, url: str) -> StoragePlace:
        """Where other commands find the storage of the experiment in `config`, which is at `url`.

        The file is named also if the storage is not its own: it may have that storage's options.
        """
        if self.moves_storage:
            return StoragePlace(config, url)
        return HERE if config == DEFAULT_EXPERIMENT else StoragePlace(config)


@dataclass(frozen=True)
class RunChanges(Changes):
    """What a command changes in the experiment that it runs.

    Attributes:
        engine: What finds the machines that train; as resources.engine. Default: the experiment's.
    """

    engine: Engine | None = None

    @property
    def overrides(self) -> list[str]:
        chosen = [] if self.engine is None else [f"resources.engine={self.engine}"]
        return [*super().overrides, *chosen]


@Parameter(name="*")
@dataclass(frozen=True)
class StoragePlace:
    """The storage that a command reads.

    Attributes:
        config: Experiment file; its checkpoint_storage is used. Default: ./experiment.yaml, if
            there is one and --storage is not given.
        storage: Where checkpoints are stored: a folder, or a URL such as s3://bucket/prefix.
            Default: checkpoint_storage of the experiment, else ./trialflow-runs/checkpoints.
    """

    config: Path | None = None
    storage: str | None = None

    @property
    def options(self) -> str:
        """The options as given, after a command: `` --config FILE --storage URL``; or empty."""
        given = {"--config": self.config, "--storage": self.storage}
        return "".join(f" {name} {quote(str(value))}" for name, value in given.items() if value)

    @property
    def experiment(self) -> Path | None:
        """`--config`; without it and without `--storage`, ./experiment.yaml if there is one."""
        if self.config is None and self.storage is None and DEFAULT_EXPERIMENT.exists():
            return DEFAULT_EXPERIMENT
        return self.config

    def trackers(self) -> dict[str, dict[str, Any]]:
        """The trackers of the experiment, with their options."""
        from trial_core.observe.trackers.tracking import trackers_of

        if (file := self.experiment) is None:
            return {}
        return trackers_of(read_any_experiment(file, Changes(storage=self.storage)))

    def open_store(self, overrides: list[str] | None = None) -> CheckpointStore:
        """Open the storage of the experiment, of `--storage`, or the default storage.

        Args:
            overrides: overrides of the experiment's fields.

        Raises:
            ConfigError: the experiment or the storage's URL is wrong.
        """
        from trial_core.checkpoint.store import CheckpointStore
        from trial_core.config import StorageConfig

        if (file := self.experiment) is not None:
            try:
                return open_store_of(read_any_experiment(file, Changes(overrides, self.storage)))
            except ConfigError as error:
                if self.config is None:
                    why = f"{file} is read because neither --config nor --storage is given"
                    raise ConfigError(f"{error}\n{why}") from None
                raise
        place = StorageConfig() if self.storage is None else moved(StorageConfig(), self.storage)
        store = CheckpointStore(place.url, place.options)
        if self.storage is None and (others := _experiment_files()):
            console.note(
                f"there is no {DEFAULT_EXPERIMENT} here, so the storage is {store.url}; to use "
                f"another experiment's, give --config, for example --config {others[0]}"
            )
        return store


UNCHANGED = Changes()
UNCHANGED_RUN = RunChanges()
HERE = StoragePlace()


def read_experiment(path: Path, changes: Changes = UNCHANGED) -> ExperimentConfig:
    """Read an experiment file, with warnings on stderr. Raises ConfigError, one mistake a line."""
    from trial_core.config import ExperimentConfig

    return read_as(ExperimentConfig, path, changes)


def read_any_experiment(path: Path, changes: Changes = UNCHANGED) -> ExperimentConfig:
    """As `read_experiment`, but the experiment may be a search."""
    from trial_core.config import ExperimentConfig
    from trial_core.config.yaml_file import override, read_mapping
    from trial_core.search.settings import SearchExperiment, searches

    is_search = False
    with contextlib.suppress(ConfigError):  # it is told below
        is_search = searches(override(read_mapping(path), changes.overrides))
    return read_as(SearchExperiment if is_search else ExperimentConfig, path, changes)


def read_retraining(path: Path, changes: Changes = UNCHANGED) -> ExperimentConfig:
    """As `read_experiment`; the experiment may be a search, if `retraining.search` says so."""
    from trial_core.search.settings import check_retraining

    experiment = read_any_experiment(path, changes)
    check_retraining(experiment, str(path))
    return experiment


def read_as(kind: type[E], path: Path, changes: Changes) -> E:
    """Read an experiment file as an experiment of this kind. Raises as `read_experiment`."""
    from trial_core.config import ExperimentWarning, load_config

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ExperimentWarning)
        try:
            experiment = load_config(path, changes.overrides, kind)
        except ConfigError as error:
            if path == DEFAULT_EXPERIMENT and not path.exists():
                hint = "name the experiment's file: trialflow COMMAND FILE"
                raise ConfigError(f"{error}; {hint}") from None
            raise
        finally:
            for each in caught:
                console.warning(f"{path}: {each.message}")
    if changes.storage is None:
        return experiment
    place = moved(experiment.checkpoint_storage, changes.storage)
    return experiment.model_copy(update={"checkpoint_storage": place})


def refuse_what_cannot_run(
    experiment: ExperimentConfig, store: CheckpointStore | None = None
) -> None:
    """Find errors that would end the run later, before a server and ranks start.

    Args:
        store: the storage to write to; None if the run only reads. A slow one has not failed.

    Raises:
        ConfigError, LaunchError, StorageError: entrypoint, code folder or storage cannot be used.
    """
    from concurrent.futures import TimeoutError as StillRunning

    from trial_core.driver.code_source import refuse_missing_code
    from trial_core.processes.machine.background import in_background

    refuse_missing_code(experiment)
    if store is not None:
        # the run waits longer
        with contextlib.suppress(StillRunning), waiting(f"trying the storage {store.url}"):
            in_background(store.storage.check_usable, "storage-check").result(STORAGE_SECONDS)


def named_trial(named: str, trials: Iterable[str], kind: str = "trial") -> str | None:
    """Return the trial with an id, else the only one whose id begins so, or None.

    Args:
        kind: ``search`` if these are searches.

    Raises:
        ConfigError: several begin so; or the id is empty, like that of an unset shell variable.
    """
    if not named:
        raise ConfigError(f"the id of the {kind} is empty: give it, or its first characters")
    found = sorted({trial for trial in trials if trial.startswith(named)})
    if len(found) > 1 and named not in found:
        raise ConfigError(f"{named} is not one {kind}, but {len(found)}: {', '.join(found)}")
    return named if named in found else next(iter(found), None)


def _experiment_files() -> list[Path]:
    """The YAML files of the working folder that have an entrypoint."""
    found = []
    for file in sorted([*Path().glob("*.yaml"), *Path().glob("*.yml")]):
        with contextlib.suppress(OSError):
            if re.search(rb"^entrypoint\s*:", file.read_bytes(), re.MULTILINE):
                found.append(file)
    return found


def with_block(experiment: ExperimentConfig) -> ExperimentConfig:
    """The experiment with the credentials of its block of Prefect's, if it names one."""
    if experiment.checkpoint_storage.credentials is None:
        return experiment
    from trialflow.flows.server.embedded_server import prefect_api
    from trialflow.tasks.storage_block import with_credentials

    with waiting("asking Prefect for the storage's credentials"), prefect_api():
        return with_credentials(experiment)


def open_store_of(experiment: ExperimentConfig) -> CheckpointStore:
    from trial_core.checkpoint.store import CheckpointStore

    place = with_block(experiment).checkpoint_storage
    return CheckpointStore(place.url, place.options, experiment.name)


def moved(place: StorageConfig, url: str) -> StorageConfig:
    """The same storage section with another URL.

    Retention rules are kept. Options may hold credentials: they are kept only for the same scheme.

    Raises:
        ConfigError: `url` is not a storage URL.
    """
    from pydantic import ValidationError

    from trial_core.config import StorageConfig, error_lines

    of_place = {"url", "options", "credentials"}
    given: dict[str, Any] = place.model_dump(exclude=of_place, exclude_none=True)
    given["url"] = url
    if _scheme(url) == _scheme(place.url):
        given |= {"options": place.options, "credentials": place.credentials}
    try:
        return StorageConfig.model_validate(given)
    except ValidationError as error:
        lines = [line.removeprefix("url: ") for line in error_lines(error)]
        raise ConfigError("\n".join(f"--storage: {line}" for line in lines)) from None


def _scheme(url: str) -> str:
    scheme, separator, _ = url.partition("://")
    return scheme.lower() if separator else "file"
