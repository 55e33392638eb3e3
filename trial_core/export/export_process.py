"""Exports a checkpoint in another process: a flow's own imports neither torch nor DeepSpeed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trial_core import errors
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig
from trial_core.export.export_checkpoint import Exported, ExportRequest, export_checkpoint
from trial_core.processes.machine.callback_process import call_function


def export_in_process(
    config: ExperimentConfig, uuid: str, to: Path, *, force: bool, **options: Any
) -> Exported:
    """Export a checkpoint of the experiment's storage; `options` are fields of `ExportRequest`.
    Raises as `export_checkpoint`, or CheckpointError if the process was killed."""
    with tempfile.TemporaryDirectory(prefix="trialflow-export-") as folder:
        answer = Path(folder) / "answer.json"
        argument = {
            "config": config.model_dump(mode="json"),
            "uuid": uuid,
            "to": str(to.absolute()),
            "force": force,
            "options": options,
        }
        here = f"{__name__}:{export_here.__name__}"
        log = Path(folder) / "log"
        problem = call_function(here, argument, code=Path(folder), log=log, result=answer)
        if not answer.exists():
            raise errors.CheckpointError(f"checkpoint {uuid} is not exported to {to}: {problem}")
        given = json.loads(answer.read_text())
    if "error" in given:
        raise getattr(errors, given["error"])(given["message"])
    return Exported(**given)


def export_here(argument: Mapping[str, Any]) -> dict[str, Any]:
    """Export in this process; return the result or the error."""
    config = ExperimentConfig.from_mapping(argument["config"])
    storage = config.checkpoint_storage
    store = CheckpointStore(storage.url, storage.options, config.name)
    try:
        request = ExportRequest(
            store.open(argument["uuid"]),
            is_trusted=config.checkpointing.trusted,
            **argument["options"],
        )
        return asdict(export_checkpoint(store, request, Path(argument["to"]), argument["force"]))
    except errors.TrialflowError as error:
        known = next(each for each in type(error).__mro__ if each.__module__ == errors.__name__)
        return {"error": known.__name__, "message": str(error)}
