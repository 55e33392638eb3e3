"""TensorBoard: event files in the trial's folder, next to those of its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from trial_core.observe.trackers import records
from trial_core.observe.trackers.journal import DRIVER_EVENTS
from trial_core.observe.trackers.tracker import BuiltInTracker


class TensorBoardTracker(BuiltInTracker):
    """Writes scalars and texts. A point that is trained again replaces the earlier one.

    Option: ``logdir``, a folder of this machine. By default the files are in the trial's folder,
    and are stored with its checkpoints.
    """

    name: ClassVar[str] = "tensorboard"
    option_types: ClassVar[Mapping[str, tuple[type, ...]]] = {"logdir": (str,)}
    replaces_points: ClassVar[bool] = True

    _writer: Any = None

    @classmethod
    def without_paths(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in options.items() if name != "logdir"}

    def open(self, known: str) -> str:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = self.options.get("logdir") or str(self.run.run_dir / DRIVER_EVENTS)
        self._writer = EventFileWriter(folder)
        return folder

    def send(self, records: Sequence[records.AnyRecord]) -> None:
        super().send(records)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def show(self, record: records.AnyRecord) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.summary_v2 import text_pb

        if isinstance(record, records.Began):
            # Readers forget the values at this step and after it.
            start = SessionLog(status=SessionLog.START)
            event = Event(step=record.batches + 1, session_log=start)
        elif isinstance(record, records.Metrics):
            values = [
                Summary.Value(tag=name, simple_value=value)
                for name, value in record.numbers.items()
            ]
            event = Event(step=record.batches, summary=Summary(value=values))
        elif isinstance(record, records.Described):
            facts = (*record.parameters.items(), *record.tags.items())
            lines = "\n".join(f"    {name}: {value}" for name, value in facts)
            event = Event(step=0, summary=text_pb("trial", lines))
        elif isinstance(record, records.Committed):
            text = text_pb("checkpoint", f"{record.url} {record.digest}")
            event = Event(step=record.batches, summary=text)
        elif isinstance(record, records.Noted):
            event = Event(step=record.batches, summary=text_pb("notice", record.text))
        else:
            return
        event.wall_time = record.at
        self._writer.add_event(event)
