"""The base class of trackers, and their search by name."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar

from trial_core.checkpoint.storage.credentials import (
    without_credentials,
    without_url_secrets,
    without_users,
)
from trial_core.common import text_format
from trial_core.config.error_text import did_you_mean, format_value
from trial_core.errors import ConfigError
from trial_core.observe.trackers.journal import PAGE
from trial_core.observe.trackers.records import AnyRecord, Committed, Deleted

GROUP = "trialflow.trackers"
"""The entry points of other packages' trackers; each is a subclass of `Tracker`."""

BUILT_IN = {
    "mlflow": "trial_core.observe.trackers.in_mlflow:MlflowTracker",
    "wandb": "trial_core.observe.trackers.in_wandb:WandbTracker",
    "tensorboard": "trial_core.observe.trackers.in_tensorboard:TensorBoardTracker",
    "trackio": "trial_core.observe.trackers.in_trackio:TrackioTracker",
}

WITH_GROUPS = ("mlflow", "wandb", "trackio")
"""Trackers with the option ``group``, which shows the trials of a search together."""

LONGEST_ERROR = 300
_logger = logging.getLogger(__name__)


class RecordRefused(Exception):
    """The tracker will never accept a record: it is left out, and the next ones are sent."""


@dataclass(frozen=True)
class TrackedRun:
    """All runs of a trial, which a tracker shows as one run.

    Attributes:
        folder: a folder for the tracker's files; it stays between the runs on one machine.
        run_dir: the trial's folder on this machine.
    """

    trial: str
    experiment: str
    folder: Path
    run_dir: Path

    @property
    def report(self) -> Path | None:
        """The trial's report as a page on this machine, or None.

        Its place is fixed, not recorded; else writers to the storage could choose a file to send.
        """
        page = self.run_dir / PAGE
        return page if page.is_file() and not page.is_symlink() else None


class Tracker:
    """Shows a trial elsewhere. Called in one thread of the sender's process.

    A method may raise anything; then it is called again later, with the same records. So a record
    may come twice, if its tracker failed after it had taken it. After a few failures in a row the
    tracker is closed, made and opened again.

    Args:
        options: the experiment's options below the tracker's name.
        run: the run to show.

    Attributes:
        replaces_points: True if a point that is trained again after a resume replaces the earlier
            one. If not, a point that is trained again with the same values is not sent again.
        measures_the_system: True if it measures the machine itself.
        place_variables: options that say where its data go, and the environment variables that its
            package uses for them.
    """

    replaces_points: ClassVar[bool] = False
    measures_the_system: ClassVar[bool] = False
    place_variables: ClassVar[Mapping[str, str]] = {}

    def __init__(self, options: Mapping[str, Any], run: TrackedRun) -> None:
        self.options = options
        self.run = run
        self._left_out: set[str] = set()

    @classmethod
    def remembered(cls, options: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, Any]:
        """The options, with the place that `variables` name, but no secrets; for a later `sync`."""
        named = {
            option: without_user(variables[variable])
            for option, variable in cls.place_variables.items()
            if variables.get(variable)
        }
        return {**named, **options}

    @classmethod
    def without_paths(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Options from a storage, without options that name a file or a folder of this machine.

        Writers to the storage must not choose where this machine reads and writes.
        """
        return dict(options)

    @classmethod
    def require_own_place(
        cls, name: str, options: Mapping[str, Any], own: Mapping[str, Any]
    ) -> None:
        """Refuse options from a storage that name a place which the caller does not name.

        Args:
            own: options of the caller's experiment.

        Raises:
            ConfigError: shows the place, which would get the caller's credentials.
        """
        for option, variable in cls.place_variables.items():
            place = options.get(option)
            known = (own.get(option), without_user(os.environ.get(variable, "")))
            if place is not None and place not in known:
                shown = text_format.one_line(str(place))
                raise ConfigError(
                    f"trackers.{name}: the trial's storage names {option} {shown}, which neither "
                    f"your experiment nor {variable} names; your credentials would be sent there. "
                    f"If you trust it, set {variable} to it, or give an experiment (--config) "
                    f"whose trackers.{name} has this {option}"
                )

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        """Refuse options that it does not have. Called before training, on the driver.

        Raises:
            ConfigError: names it, and the existing ones.
        """

    def open(self, known: str) -> str:
        """Begin the trial's run there, or continue it.

        Args:
            known: the result of an earlier call, maybe on another machine; empty before the first.
                It comes out of the storage, where others may write: check that it is the trial's.

        Returns:
            The id of the run there, which the trial's storage remembers.
        """
        raise NotImplementedError

    def recall(self, records: Sequence[Committed | Deleted]) -> None:
        """Receive the checkpoints that the run there already knows. Called once, after `open`."""

    def send(self, records: Sequence[AnyRecord]) -> None:
        """Show these records, in their order.

        Raises:
            RecordRefused: it will never take the first of them.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Close it: the sender ends, or opens it again. The trial may continue later."""

    @contextmanager
    def best_effort(self, what: str) -> Iterator[None]:
        """Allow the block, for files and links, to fail: the log says so once; records are sent."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - a tracker's program may raise anything
            if what not in self._left_out:
                _logger.warning("%s is left out (said once): %s", what, describe(error))
            self._left_out.add(what)


def find_tracker(name: str) -> type[Tracker]:
    """The class of a tracker. ConfigError if no tracker has that name, or its package is not
    installed or fails."""
    if (target := BUILT_IN.get(name)) is not None:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"trackers: {name} is not installed in the driver's environment; "
                f"pip install 'trialflow[{name}]'"
            )
        module, _, attribute = target.partition(":")
        found: type[Tracker] = getattr(import_module(module), attribute)
        return found
    others = {point.name: point for point in entry_points(group=GROUP)}
    if name not in others:
        known = [*BUILT_IN, *others]
        raise ConfigError(
            f"trackers: no tracker is named {name!r}{did_you_mean(name, known)}; there are "
            f"{', '.join(known)}, and packages may add others by entry points of {GROUP}"
        )
    try:
        loaded: type[Tracker] = others[name].load()
    except Exception as error:  # code of another package may raise anything
        raise ConfigError(
            f"trackers: {name} cannot be loaded from {others[name].value}: {describe(error)}"
        ) from error
    return loaded


def without_user(place: str) -> str:
    """A tracker's place without possible secrets: a user, a password, a token, a query."""
    return without_users(without_credentials(place))


def describe(error: BaseException) -> str:
    """An error in one line, not too long, without the secrets that URLs may have."""
    text = text_format.one_line(f"{type(error).__name__}: {error}")
    return text_format.shortened(without_url_secrets(text), LONGEST_ERROR)


EXPECTED = {str: "text", bool: "true or false", dict: "a mapping", list: "a list"}
"""The types that options of trackers may have, in words."""


class BuiltInTracker(Tracker):
    """A tracker of trialflow's own, which shows one record after the other."""

    name: ClassVar[str]
    option_types: ClassVar[Mapping[str, tuple[type, ...]]]

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        for option, value in options.items():
            if option not in cls.option_types:
                known = list(cls.option_types)
                raise ConfigError(
                    f"trackers.{cls.name}: unknown field {option!r}{did_you_mean(option, known)}; "
                    f"it has {', '.join(known)}"
                )
            if not isinstance(value, cls.option_types[option]):
                expected = " or ".join(EXPECTED[kind] for kind in cls.option_types[option])
                raise ConfigError(
                    f"trackers.{cls.name}.{option}: expected {expected}, got {format_value(value)}"
                )

    def send(self, records: Sequence[AnyRecord]) -> None:
        for record in records:
            self.show(record)

    def show(self, record: AnyRecord) -> None:
        """Show one record."""
        raise NotImplementedError
