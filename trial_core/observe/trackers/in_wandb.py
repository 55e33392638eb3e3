"""Weights & Biases: a run on https://wandb.ai, on a server of one's own, or offline."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, ClassVar
from urllib.parse import urlsplit

from trial_core.observe.trackers import records
from trial_core.observe.trackers.tracker import BuiltInTracker


class WandbTracker(BuiltInTracker):
    """One run of W&B, whose id is the trial's.

    A point that is trained again with another value is a second one, with a greater ``attempt``.
    Options, as in `wandb.init`: ``project`` (default: the experiment's name), ``entity``,
    ``group``, ``job_type``, ``mode`` (``online``, ``offline``), ``name``, ``tags``, ``notes``; and
    ``base_url``, a server's address. The key comes from WANDB_API_KEY, or from `wandb login`.
    """

    name: ClassVar[str] = "wandb"
    option_types: ClassVar[Mapping[str, tuple[type, ...]]] = dict.fromkeys(
        ("project", "entity", "group", "job_type", "mode", "name", "notes", "base_url"), (str,)
    ) | {"tags": (list,)}
    measures_the_system: ClassVar[bool] = True
    place_variables: ClassVar[Mapping[str, str]] = {
        "base_url": "WANDB_BASE_URL", "mode": "WANDB_MODE", "entity": "WANDB_ENTITY",
    }  # fmt: skip

    _run: Any = None
    _exit_code = 0

    def open(self, known: str) -> str:
        import wandb

        given = {"project": self.run.experiment, "name": self.run.trial, **self.options}
        if (url := given.pop("base_url", None)) is not None:
            os.environ["WANDB_BASE_URL"] = url
        self._run = wandb.init(
            id=self.run.trial, resume="allow", dir=self.run.folder,
            settings=wandb.Settings(console="off", silent=True, init_timeout=30), **given,
        )  # fmt: skip
        self._run.define_metric("batches")
        self._run.define_metric("*", step_metric="batches")
        return str(self._run.id)

    def close(self) -> None:
        self._run.finish(exit_code=self._exit_code)

    def show(self, record: records.AnyRecord) -> None:
        import wandb

        run = self._run
        if isinstance(record, records.Metrics):
            place = {
                "batches": record.batches, "samples": record.samples, "attempt": record.attempt,
            }  # fmt: skip
            run.log({**record.numbers, **place, "_timestamp": record.at})
        elif isinstance(record, records.Described):
            run.config.update({**record.parameters, "tags": record.tags}, allow_val_change=True)
        elif isinstance(record, records.Began):
            run.summary["attempt"] = record.attempt
        elif isinstance(record, records.Committed):
            facts = {"digest": record.digest, "batches": record.batches, "bytes": record.size_bytes}
            run.summary["checkpoint"] = {"url": record.url, **facts}
            with self.best_effort("the artifact of a checkpoint"):  # s3:// needs boto3
                artifact = wandb.Artifact(f"{run.id}-checkpoint", "checkpoint", metadata=facts)
                if urlsplit(record.url).scheme == "file":
                    # In a local folder, W&B lists the files; the storage must not choose which.
                    with artifact.new_file("checkpoint.json") as file:
                        json.dump({"url": record.url, **facts}, file)
                else:
                    artifact.add_reference(record.url, checksum=False)
                run.log_artifact(artifact, aliases=["latest", f"batch-{record.batches}"])
        elif isinstance(record, records.Noted):
            run.alert(title=f"batch {record.batches}", text=record.text)
        elif isinstance(record, records.RunEnded):
            run.summary["ended"] = record.why or record.outcome
            self._exit_code = int(record.outcome == "failed")
            with self.best_effort("the report"):
                if (page := self.run.report) is not None:
                    run.save(str(page), base_path=str(page.parent), policy="now")
