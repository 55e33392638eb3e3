"""The types of what commands print with `--json`, of which the reference page is made.

A test compares what commands print with these types.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NotRequired, TypedDict, get_type_hints

import msgspec

from trial_core.checkpoint.manifest import Manifest
from trial_core.models.records import Alias, Move, Version
from trial_core.models.registry import HeldVersion
from trial_core.search.halving import Advance
from trial_core.search.plan import BracketPlan
from trial_core.search.state import SearchTrial
from trialflow.deployments.cli.check import Check
from trialflow.deployments.cli.json_result import JsonStatus
from trialflow.deployments.resources import Change

_new_type: Any = TypedDict  # mypy knows only types that are written out
_list: Any = list

PRINTED_BY_ALL = {
    "command": "The command that this is the result of.",
    "schema_version": "Greater if a field has been removed, or has got another meaning.",
}


class CheckpointEntry(TypedDict):
    """A checkpoint.

    Attributes:
        metrics: of this very state: `training` and, if it was validated, `validation`.
        earlier_validation: metrics of the last validation, if that was at an earlier batch.
        validated_at: the batch of the last validation.
        own_bytes: without files that an earlier checkpoint has stored.
        url: the folder of its files.
    """

    uuid: str
    trial: str
    experiment: str
    created_at: str
    metrics: dict[str, dict[str, Any]]
    earlier_validation: dict[str, Any]
    batches_trained: int
    validated_at: int | None
    total_bytes: int
    own_bytes: int
    url: str


class ListedCheckpoint(CheckpointEntry):
    """A checkpoint of a list.

    Attributes:
        is_best: the best of its trial, by its searcher.metric.
        held_by: versions of models that protect it.
    """

    is_best: bool
    is_pinned: bool
    held_by: list[HeldVersion]


class DownloadedCheckpoint(CheckpointEntry):
    folder: str


class Pinned(TypedDict):
    uuid: str
    reason: str
    by: str
    at: str


class DamagedFile(TypedDict):
    """Attributes:
    seen_bytes, seen_digest: null: it is missing, or was not read.
    """

    path: str
    rank: int
    expected_bytes: int
    expected_digest: str
    seen_bytes: int | None
    seen_digest: str | None


class VerifiedCheckpoint(TypedDict):
    """Attributes:
    problem: why its manifest cannot be read.
    repaired: paths of files that were stored again.
    """

    uuid: str
    trial: str
    batches_trained: int
    is_whole: bool
    files: int | None
    total_bytes: int | None
    problem: str | None
    repaired: list[str]
    damage: list[DamagedFile]


class PrunedRow(TypedDict):
    """Attributes:
    action: `keep` or `delete`.
    why: which rule keeps it, or that none does.
    """

    action: Literal["keep", "delete"]
    uuid: str
    trial: str
    batches_trained: int | None
    created_at: str
    total_bytes: int
    own_bytes: NotRequired[int]
    experiment: NotRequired[str]
    why: str


class PruningDone(TypedDict):
    """Attributes:
    policy: the rules; null with --leftovers-only.
    spared: checkpoints that are needed since the plan was made, and why.
    leftovers: uploads of killed runs.
    swept: uuids of deleted leftovers.
    """

    policy: str | None
    plan: list[PrunedRow]
    is_dry_run: bool
    deleted: list[str]
    spared: dict[str, str]
    leftovers: list[PrunedRow]
    swept: list[str]
    freed_bytes: int


class ListedRun(TypedDict):
    """A trial with checkpoints.

    Attributes:
        saved_at: of its newest checkpoint.
        metric: its searcher.metric.
        results: `batches`, `ended` (how its last run ended; null: it trains, or was killed),
            `best_METRIC`, `best_at_batch`, and `last_…` for each metric of its last validation.
    """

    trial: str
    experiment: str
    saved_at: str
    metric: str
    results: dict[str, Any]
    hyperparameters: dict[str, Any]


class RunComparison(TypedDict):
    """Attributes:
    settings: fields of the experiments that differ; a value for each trial, in their order.
    results: likewise; see `runs list`.
    """

    trials: list[str]
    settings: dict[str, list[Any]]
    results: dict[str, list[Any]]


class TimeOfSlots(TypedDict):
    """Attributes:
    slot_seconds: by use.
    goodput: the share of slot-seconds that trained and counts.
    cost: null if the experiment has no price.
    """

    slot_seconds: dict[str, float]
    total_slot_seconds: float
    goodput: float | None
    cost: float | None


class TimeOfRun(TimeOfSlots):
    number: int
    by: str
    began_at: str
    until: str
    is_over: bool
    slots: int
    per_slot_hour: float | None


class ShownRun(TimeOfSlots):
    """Attributes:
    results: see `runs list`; empty without a checkpoint.
    links: pages of the trial's last run, such as Prefect's; empty without a checkpoint.
    unsent_records: how many records each tracker lacks.
    """

    trial: str
    runs: list[TimeOfRun]
    results: dict[str, Any]
    hyperparameters: dict[str, Any]
    links: list[str]
    unsent_records: dict[str, int]


class SyncedRun(TypedDict):
    """Attributes:
    sent, unsent: how many records, by tracker.
    """

    trial: str
    sent: dict[str, int]
    unsent: dict[str, int]


class RemovedFolder(TypedDict):
    trial: str
    size_bytes: int


class KeptFolder(TypedDict):
    trial: str
    why: str


class CleanedRuns(TypedDict):
    folder: str
    removed: list[RemovedFolder]
    kept: list[KeptFolder]


class SearchEntry(TypedDict, total=False):
    """A search. Only `search` and `problem` if it cannot be read.

    Attributes:
        best: the best value of its metric; null without a result.
        progress: from 0 to 1.
    """

    search: str
    problem: str
    experiment: str
    searcher: str
    metric: str
    smaller_is_better: bool
    trials: int
    max_trials: int
    failed: int
    batches: int
    best: float | None
    best_trial: str | None
    best_checkpoint: str | None
    progress: float
    is_over: bool
    began_at: str
    last_at: str


class ModelEntry(TypedDict, total=False):
    """A model. Only `model` and `problem` if it cannot be read.

    Attributes:
        champion, previous: numbers of versions.
        versions: how many it has.
        since: when the champion became that.
        checkpoint: the champion's.
    """

    model: str
    problem: str
    champion: int | None
    previous: int | None
    versions: int
    since: str | None
    checkpoint: str | None


class UnpackedFile(TypedDict):
    path: str
    why: str


class MigrationFinding(TypedDict):
    """Attributes:
    line: 0: the whole file.
    """

    path: str
    line: int
    text: str


class AskedRun(TypedDict):
    """Attributes:
    flow_run_id: null for a run of this machine that no server knows.
    message: what becomes of the run, and how it continues.
    """

    trial: str
    flow_run_id: str | None
    message: str


class ExportedFile(TypedDict):
    """Attributes:
    names: how many tensors; of a format `deepspeed`, files.
    missing: names that the checkpoint does not have.
    """

    uuid: str
    file: str
    names: int
    size_bytes: int
    dtype: str
    engine: int
    format: str
    missing: list[str]
    pushed_to: str | None


class Evaluated(TypedDict):
    checkpoint: str
    trial: str
    batches_trained: int
    metrics: dict[str, Any]
    changes: list[str]
    flow_run_id: str | None


def json_types() -> dict[str, Any]:
    """The type of each command's result, by the command's words."""
    # They import Prefect, which a process that only prints help does without.
    from trialflow.flows.retraining.outcome import RetrainResult
    from trialflow.flows.search import SearchResult
    from trialflow.flows.train import TrialResult

    version = _extended(Version, alias=Alias | None, is_deleted=bool, became=str)
    search = {**get_type_hints(SearchEntry), "unit": str, "brackets": list[BracketPlan]}
    model = {**get_type_hints(ModelEntry), "versions": _list[version], "moves": list[Move]}
    text = str | None
    trained = _extended(
        TrialResult, trial=text, batches_trained=int | None, status=JsonStatus, error_type=text,
        error=text,
    )  # fmt: skip
    pins, move = _made("Pins", pins=list[Pinned]), _extended(Move, is_new=bool)
    retraining = Literal["promoted", "kept", "stopped", "skipped"]
    return {
        "train": trained,
        "evaluate": Evaluated,
        "retrain": _extended(RetrainResult, always=("why",), status=retraining),
        "search": SearchResult,
        "search list": _made("Searches", searches=list[SearchEntry]),
        "search show": _made(
            "Search", trials=list[SearchTrial], promotions=list[Advance],
            **{name: kind for name, kind in search.items() if name not in ("problem", "trials")},
        ),
        "tune-batch": _made(
            "MicroBatch", train_batch_size=int, train_micro_batch_size_per_gpu=int,
            data_parallel_ranks=int,
        ),
        "runs list": _made("Runs", trials=list[ListedRun]),
        "runs compare": RunComparison,
        "runs show": ShownRun,
        "runs sync": SyncedRun,
        "runs clean": CleanedRuns,
        "logs": _made("Log", trial=str, rank=int, text=str),
        "start": AskedRun,
        "suspend": AskedRun,
        "resume": AskedRun,
        "cancel": AskedRun,
        "checkpoints list": _made("Checkpoints", checkpoints=list[ListedCheckpoint]),
        "checkpoints show": _made("ShownCheckpoint", manifest=_extended(Manifest, digest=str)),
        "checkpoints download": DownloadedCheckpoint,
        "checkpoints pin": pins,
        "checkpoints unpin": pins,
        "checkpoints verify": _made("Verification", checkpoints=list[VerifiedCheckpoint]),
        "checkpoints prune": PruningDone,
        "models list": _made("Models", models=list[ModelEntry]),
        "models show": _made("Model", **{n: k for n, k in model.items() if n != "problem"}),
        "models promote": move,
        "models rollback": move,
        "export": ExportedFile,
        "config": _new_type(
            "Config",
            {
                "config": dict[str, Any], "files": dict[str, int], "left_out": list[UnpackedFile],
                "problems": list[str],
            },
            total=False,
        ),
        "init": _made("Begun", folder=str, files=list[str], next=list[str]),
        "migrate": _made(
            "Migration", is_dry_run=bool, changed=list[str], findings=list[MigrationFinding]
        ),
        "deploy": _made("Deployment", is_dry_run=bool, changes=list[Change]),
        "data-arrived": _made(
            "Arrival", event=str, model=str, data=dict[str, Any], problem=text
        ),
        "up": _made(
            "Services", api_url=str, ui_url=str, pool=str, password_file=str, server_log=str,
            worker_log=str,
        ),
        "worker": _made("Worker", pool=str, stopped_by=str),
        "join": _made("Node", driver=str, has_left=bool),
        "jobset": _made("JobSet", jobset=dict[str, Any]),
        "doctor": _made("Checks", checks=list[Check]),
    }  # fmt: skip


def _made(name: str, **fields: Any) -> Any:
    return _new_type(name, fields)


def _extended(record: type, always: Sequence[str] | None = None, **fields: Any) -> Any:
    """A record as it is printed, with more fields. A result's experiment is not printed.

    Args:
        always: the record's fields that are never missing. Default: all.
    """
    kinds = get_type_hints(record, include_extras=True)
    names = (
        {each.name: each.name for each in dataclasses.fields(record)}
        if dataclasses.is_dataclass(record)
        else {each.name: each.encode_name for each in msgspec.structs.fields(record)}
    )
    own = {
        encoded: kinds[name] if always is None or name in always else NotRequired[kinds[name]]
        for name, encoded in names.items()
        if name != "config" or record is Manifest
    }
    made = _new_type(f"Printed{record.__name__}", {**own, **fields})
    made.__doc__ = record.__doc__
    return made
