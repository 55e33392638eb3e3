"""Trackio: Hugging Face's tracker, on this machine or in a Space."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from trial_core.observe.trackers.records import AnyRecord, Committed, Described, Metrics, Noted
from trial_core.observe.trackers.tracker import BuiltInTracker


class TrackioTracker(BuiltInTracker):
    """One run of Trackio, whose name is the trial's id.

    Options, as in `trackio.init`: ``project`` (default: the experiment's name), ``space_id``,
    ``dataset_id``, ``group``, ``server_url``.
    """

    name: ClassVar[str] = "trackio"
    option_types: ClassVar[Mapping[str, tuple[type, ...]]] = dict.fromkeys(
        ("project", "space_id", "dataset_id", "group", "server_url"), (str,)
    )
    measures_the_system: ClassVar[bool] = True
    place_variables: ClassVar[Mapping[str, str]] = {
        "space_id": "TRACKIO_SPACE_ID", "server_url": "TRACKIO_SERVER_URL",
    }  # fmt: skip

    _run: Any = None

    def open(self, known: str) -> str:
        import trackio

        given = {"project": self.run.experiment, **self.options, "name": self.run.trial}
        self._run = trackio.init(resume="allow", embed=False, **given)
        return str(self._run.name)

    def show(self, record: AnyRecord) -> None:
        if isinstance(record, Metrics):
            shown = {**record.numbers, "samples": record.samples, "attempt": record.attempt}
            self._run.log(shown, step=record.batches)
        elif isinstance(record, Described):
            self._run.config.update({**record.parameters, **record.tags})
        elif isinstance(record, Committed):
            place = {"checkpoint": record.url, "checkpoint_digest": record.digest}
            self._run.log(place, step=record.batches)
        elif isinstance(record, Noted):
            self._run.alert(title=f"batch {record.batches}", text=record.text)

    def close(self) -> None:
        self._run.finish()
