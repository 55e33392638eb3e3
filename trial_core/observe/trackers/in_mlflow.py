"""MLflow: a run on its tracking server, https://mlflow.org."""

from __future__ import annotations

import glob
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from trial_core.errors import ConfigError
from trial_core.observe.trackers.records import (
    AnyRecord,
    Began,
    Committed,
    Deleted,
    Described,
    Metrics,
    Noted,
    RunEnded,
)
from trial_core.observe.trackers.tracker import (
    BuiltInTracker,
    RecordRefused,
    TrackedRun,
    without_user,
)

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

VARIABLE = "MLFLOW_TRACKING_URI"
TRIAL_TAG, GROUP_TAG = "trialflow.trial", "trialflow.group"
LONGEST_PARAMETER, LONGEST_TAG = 6000, 5000
MOST_METRICS, MOST_PARAMETERS, MOST_TAGS = 1000, 100, 100
_STATUS = {"completed": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
# Servers. A path, file: or sqlite: is on this machine; queries of databases may name files.
_SERVER = re.compile(
    r"databricks(-uc)?|((https?|databricks(-uc)?)|(postgresql|mysql|mssql)(\+\w+)?)://[^/?%][^?%]*"
)
_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")
# They are about the request, not the server: the same request will be refused again. So is each
# request for a run that is deleted, until it is restored.
_REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "INVALID_STATE", "MALFORMED_REQUEST")


class MlflowTracker(BuiltInTracker):
    """One run of MLflow.

    Points that are trained again are logged again at their step if their values differ; MLflow
    shows the last one. Options: ``tracking_uri`` (default: ``MLFLOW_TRACKING_URI``), ``experiment``
    (default: the experiment's name), ``run_name`` (default: the trial's id), ``tags``, ``group``
    (the name of the parent run, which is made if it does not exist), and ``artifacts``: true to
    store the report and the list of checkpoints there (default: true).
    ``registered_model``: see `trial_core.observe.trackers.model_registry`.
    """

    name: ClassVar[str] = "mlflow"
    option_types: ClassVar[Mapping[str, tuple[type, ...]]] = {
        "tracking_uri": (str,), "experiment": (str,), "run_name": (str,), "tags": (dict,),
        "artifacts": (bool,), "registered_model": (bool, str), "group": (str,),
    }  # fmt: skip
    place_variables: ClassVar[Mapping[str, str]] = {"tracking_uri": VARIABLE}

    def __init__(self, options: Mapping[str, Any], run: TrackedRun) -> None:
        super().__init__(options, run)
        self._id = ""
        self._parameters: dict[str, str] = {}
        self._known: dict[str, dict[int, float]] = {}
        self._is_continued = False
        self._checkpoints: dict[str, dict[str, Any]] = {}

    @classmethod
    def without_paths(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        place = str(options.get("tracking_uri", ""))
        if _SERVER.fullmatch(place) or place == without_user(os.environ.get(VARIABLE, "")):
            return dict(options)
        return {name: value for name, value in options.items() if name != "tracking_uri"}

    @cached_property
    def _client(self) -> MlflowClient:
        _create_database(place_of(self.options), self.run.trial)
        return quiet_client(self.options)

    def open(self, known: str) -> str:
        self._id = known or self._of_trial() or self._created()
        run = self._client.get_run(self._id)
        if run.data.tags.get(TRIAL_TAG) != self.run.trial:  # the storage may name any run
            self._id = self._of_trial() or self._created()
            run = self._client.get_run(self._id)
        self._parameters = dict(run.data.params)
        self._is_continued = bool(run.data.metrics)
        self._client.update_run(self._id, status="RUNNING")
        return self._id

    def recall(self, records: Sequence[Committed | Deleted]) -> None:
        for record in records:
            if isinstance(record, Deleted):
                self._checkpoints.pop(record.uuid, None)
            else:
                self._checkpoints[record.uuid] = {
                    "batches": record.batches, "url": record.url, "digest": record.digest,
                    "size_bytes": record.size_bytes,
                }  # fmt: skip

    def send(self, records: Sequence[AnyRecord]) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self._log_metrics(each for each in records if isinstance(each, Metrics))
            super().send(records)
        except MlflowException as error:
            if error.error_code not in _REFUSALS:
                raise
            if self._client.get_run(self._id).info.lifecycle_stage == "active":
                raise RecordRefused(str(error)) from error
            raise

    def _of_trial(self) -> str | None:
        """The trial's run, if it was made but the answer was lost."""
        return self._found(TRIAL_TAG, self.run.trial)

    def _found(self, tag: str, text: str) -> str | None:
        """The first run with this tag."""
        runs = self._client.search_runs(
            [self._experiment], filter_string=f"tags.`{tag}` = '{text}'",
            order_by=["attributes.start_time", "attributes.run_id"], max_results=1,
        )  # fmt: skip
        return str(runs[0].info.run_id) if runs else None

    def _created(self) -> str:
        from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

        tags = {**self.options.get("tags", {}), TRIAL_TAG: self.run.trial}
        if group := self.options.get("group"):
            tags[MLFLOW_PARENT_RUN_ID] = self._parent(group)
        name = self.options.get("run_name", self.run.trial)
        run = self._client.create_run(self._experiment, tags=tags, run_name=name)
        return str(run.info.run_id)

    def _parent(self, group: str) -> str:
        """The parent run of a group, made if it does not exist. Of two made at once one stays."""
        tag = _name(group)  # no quotes: MLflow's filters know no escapes
        if (found := self._found(GROUP_TAG, tag)) is not None:
            return found
        run = self._client.create_run(self._experiment, tags={GROUP_TAG: tag}, run_name=group)
        made = str(run.info.run_id)
        self._client.set_terminated(made)  # no process is behind it
        if (first := self._found(GROUP_TAG, tag) or made) != made:
            self._client.delete_run(made)
        return first

    @cached_property
    def _experiment(self) -> str:
        """The id of the experiment, which is made if it does not exist."""
        from mlflow.exceptions import MlflowException

        name = self.options.get("experiment", self.run.experiment)
        if (found := self._client.get_experiment_by_name(name)) is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                found = self._client.get_experiment_by_name(name)
        if found is None:
            raise RuntimeError(f"MLflow has no experiment {name!r} although it was made")
        return str(found.experiment_id)

    def _log_metrics(self, records: Iterable[Metrics]) -> None:
        from mlflow.entities import Metric

        metrics = []
        for record in records:
            for name, number in record.numbers.items():
                key = _name(name)
                if not self._has(key, record.batches, number):
                    metrics.append(Metric(key, number, round(record.at * 1000), record.batches))
        self._log_batches("metrics", metrics, MOST_METRICS)

    def _log_batches(self, kind: str, logged: Sequence[Any], most: int) -> None:
        """Log metrics, params or tags in requests of at most `most` each, which MLflow takes."""
        for first in range(0, len(logged), most):
            batch: dict[str, Any] = {kind: logged[first : first + most]}
            self._client.log_batch(self._id, **batch)

    def _has(self, key: str, step: int, value: float) -> bool:
        """True if the run there has the point, maybe from another machine that is lost."""
        if not self._is_continued:
            return False
        if key not in self._known:
            history = self._client.get_metric_history(self._id, key)
            self._known[key] = {each.step: each.value for each in history}
        there = self._known[key].get(step)
        return there == value or (there is not None and math.isnan(there) and math.isnan(value))

    def show(self, record: AnyRecord) -> None:
        from mlflow.entities import Param, RunTag

        if isinstance(record, Described):
            new = {
                _name(name): str(value)[:LONGEST_PARAMETER]
                for name, value in record.parameters.items()
            }
            known = self._parameters
            # MLflow's parameters never change: a later value is a tag.
            changed = {
                f"changed.{k}": text for k, text in new.items() if known.get(k, text) != text
            }
            tags = {**record.tags, **changed}
            added = [Param(name, text) for name, text in new.items() if name not in known]
            self._log_batches("params", added, MOST_PARAMETERS)
            shown = [RunTag(_name(name), text[:LONGEST_TAG]) for name, text in tags.items()]
            self._log_batches("tags", shown, MOST_TAGS)
            self._parameters |= {each.key: each.value for each in added}
        elif isinstance(record, Began):
            if record.batches:
                begin = f"continues from batch {record.batches}"
                self._tag(f"trialflow.run_{record.attempt}", begin)
        elif isinstance(record, Committed):
            self.recall([record])
            self._tag("trialflow.checkpoint", record.url)
            self._tag("trialflow.checkpoint_digest", record.digest)
            self._log_checkpoints()
        elif isinstance(record, Deleted):
            self.recall([record])
            self._log_checkpoints()
        elif isinstance(record, Noted):
            self._tag("trialflow.last_notice", f"batch {record.batches}: {record.text}")
        elif isinstance(record, RunEnded):
            self._tag("trialflow.ended", record.why or record.outcome)
            status = _STATUS.get(record.outcome, "KILLED")
            self._client.set_terminated(self._id, status, end_time=round(record.at * 1000))
            if self.options.get("artifacts", True) and (page := self.run.report) is not None:
                with self.best_effort("the report"):
                    self._client.log_artifact(self._id, str(page))

    def _tag(self, name: str, text: str) -> None:
        self._client.set_tag(self._id, name, text[:LONGEST_TAG])

    def _log_checkpoints(self) -> None:
        if self.options.get("artifacts", True):
            text = json.dumps(self._checkpoints, indent=1)
            with self.best_effort("the list of checkpoints"):
                self._client.log_text(self._id, text, "checkpoints.json")


def _create_database(place: str, trial: str) -> None:
    """Create MLflow's database at `place` if that is a SQLite file that does not exist.

    It exists with all its tables, or not at all. MLflow creates its tables in the database's own
    file, which takes many seconds on a slow machine. If its process ends meanwhile, nothing can
    open the file any more, not even ``mlflow db upgrade``. Until then the file is named after the
    trial, which has one sender at a time.
    """
    if not place.startswith("sqlite"):
        return
    from sqlalchemy.engine import make_url

    name = make_url(place).database
    # None for a database in memory, and for SQLite's own kind of URL.
    if not name or name == ":memory:" or name.startswith("file:") or (path := Path(name)).exists():
        return
    from mlflow.tracking import MlflowClient

    new = path.with_name(f".{path.name}.{trial}.part")
    for left in new.parent.glob(f"{glob.escape(new.name)}*"):  # by a process that has ended
        left.unlink()
    whole = make_url(place).set(database=str(new))
    MlflowClient(whole.render_as_string(hide_password=False)).search_experiments(max_results=1)
    try:
        with suppress(FileExistsError):  # another trial's sender was faster
            os.link(new, path)
    except OSError:  # a file system without hard links
        if not path.exists():
            os.rename(new, path)
    new.unlink(missing_ok=True)


def quiet_client(options: Mapping[str, Any]) -> MlflowClient:
    """A client that gives up within seconds."""
    # Its own limits are minutes, but the outbox tries again by itself.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    from mlflow.tracking import MlflowClient

    return MlflowClient(place_of(options))


def place_of(options: Mapping[str, Any]) -> str:
    """Where MLflow's server or database is. ConfigError if neither says it."""
    variable = os.environ.get(VARIABLE, "")
    place = str(options.get("tracking_uri") or variable)
    if without_user(variable) == without_user(place):
        place = variable
    if not place:
        raise ConfigError(
            "trackers.mlflow: give it tracking_uri, or the driver MLFLOW_TRACKING_URI: where "
            "MLflow's server or database is. (What a trial's storage says of it counts only if it "
            "is a server, or what MLFLOW_TRACKING_URI says, too)"
        )
    return place


def _name(text: str) -> str:
    """A name that MLflow takes: its characters, and a path that only leads down."""
    parts = _NOT_IN_NAMES.sub("_", text)[:250].split("/")
    name = "/".join(part for part in parts if part not in ("", ".", "..")) or "_"
    return f"__{name[2:]}" if name.startswith("..") else name
