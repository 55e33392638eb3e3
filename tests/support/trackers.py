"""Reads back what trackers show of a trial, by their own readers where they have one.

These are imported on use: that takes a second, in each process that collects the tests.
"""

from __future__ import annotations

import json
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Points = list[tuple[int, float]]
_BLOCK, _HEADER = 32768, 7


def in_tensorboard(folder: Path, tag: str) -> Points:
    """The points of a tag in a folder of event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), {"scalars": 0})
    accumulator.Reload()
    return [(each.step, each.value) for each in accumulator.Scalars(tag)]


def in_trackio(folder: Path, project: str, name: str) -> Points:
    """The points of a metric in the database of a project, which has one run."""
    with sqlite3.connect(folder / f"{project}.db") as database:
        rows = database.execute(
            "SELECT run_name, step, metrics FROM metrics ORDER BY id"
        ).fetchall()
    assert len({run for run, _, _ in rows}) == 1
    values = [(step, json.loads(metrics)) for _, step, metrics in rows]
    return [(step, each[name]) for step, each in values if name in each]


def in_wandb(folders: list[Path], name: str) -> Points:
    """The points of a metric in all offline files of a trial, which are of one run."""
    files = sorted(file for folder in folders for file in folder.glob("wandb/*run-*/run-*.wandb"))
    records = [record for file in files for record in wandb_records(file)]
    ids = {each.run.run_id for each in records if each.WhichOneof("record_type") == "run"}
    assert len(ids) == 1
    points = []
    for record in records:
        if record.WhichOneof("record_type") == "history":
            row = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            if name in row:
                points.append((row["batches"], row[name]))
    return points


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of an offline file: LevelDB's log format after a header of seven bytes."""
    from wandb.proto import wandb_internal_pb2

    data, offset, pending = file.read_bytes(), _HEADER, b""
    while offset + _HEADER <= len(data):
        if (left := _BLOCK - offset % _BLOCK) < _HEADER:
            offset += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, offset)
        pending += data[offset + _HEADER : offset + _HEADER + size]
        offset += _HEADER + size
        if kind in (1, 4):  # the whole record, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(pending)
            pending = b""
            yield record
