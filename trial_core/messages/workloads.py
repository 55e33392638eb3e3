"""What the driver asks of the ranks, and what they hand back.

Every rank gets the same `Request`, and hands back the `Result` that follows it here, or `Done`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from trial_core.checkpoint.manifest import FileEntry, Topology
from trial_core.checkpoint.resume_point import Restore
from trial_core.checkpoint.store import StorageSpec
from trial_core.units import EpochLength

Lane = Literal["compute", "io"]


class Message(msgspec.Struct, tag=True, kw_only=True):
    """Base of everything that travels; the tag is the class's name."""


class Request(Message):
    """A workload for all ranks. `lane` says which of a rank's two lanes runs it."""

    lane: ClassVar[Lane] = "compute"


class Result(Message):
    """What a rank hands back for a request that it has carried out."""


class Done(Result):
    """Carried out; nothing to report."""


class Ping(Request):
    """Do nothing, and say so. Measures the channel."""


class BuildTrial(Request):
    """Import the entrypoint, initialise torch.distributed, and construct the user's trial.

    Attributes:
        trial: the trial's id.
        experiment: the checked experiment configuration, as plain data.
        run_dir: a folder on the rank's machine for logs, staging and restored files.
        storage: where checkpoints go.
    """

    trial: str
    experiment: dict[str, Any]
    run_dir: str
    storage: StorageSpec


class TrialBuilt(Result):
    """The trial exists.

    Attributes:
        hooks: the callback hooks that some callback of the trial overrides.
        topology: how the ranks divide the work.
        batch_samples: samples in one batch, all ranks together (`train_batch_size`).
        versions: versions of what the rank runs on.
    """

    hooks: list[str]
    topology: Topology
    batch_samples: int
    versions: dict[str, str]


class FetchCheckpoint(Request):
    """Bring a checkpoint's files to this machine, each verified; the machine's ranks share them.

    Attributes:
        files: all of the checkpoint's.
        saved_by: how the ranks that saved it divided the work: then only those files are fetched
            that this machine's ranks need. None: all.
        restore: how much of it will be restored.
    """

    lane: ClassVar[Lane] = "io"
    uuid: str
    files: list[FileEntry]
    saved_by: Topology | None = None
    restore: Restore = "everything"


class Fetched(Result):
    """The files are here, unless one of these says why not.

    Attributes:
        damage: how they differ from what the manifest promises.
        problem: how the storage failed; asking again may help.
    """

    damage: str | None = None
    problem: str | None = None


class BuildLoaders(Request):
    """Build the data loaders, and restore from `checkpoint` when there is one.

    Attributes:
        batches_trained: where training begins (or goes on).
        checkpoint: uuid of a checkpoint that was fetched before.
        restore: how much of it is restored.
        saved_by: how the ranks that saved it divided the work; None: as these do.
        validation_limit: `evaluate_batch` calls after which a validation ends; None: no limit.
    """

    batches_trained: int
    checkpoint: str | None
    restore: Restore = "everything"
    saved_by: Topology | None = None
    validation_limit: int | None = None


class LoadersBuilt(Result):
    """The loaders exist and the rank is ready to train.

    Attributes:
        epoch: how long an epoch is; None when the training loader has no length.
    """

    epoch: EpochLength | None


class TrainBatches(Request):
    """Train until `until` batches have been trained in all."""

    until: int


class Trained(Result):
    """A train-workload is over.

    Attributes:
        batches_trained: in all; fewer than asked for if the run was asked to stop.
        metrics: averaged over the workload's batches and all ranks; the same on every rank.
        seconds: wall time of the workload on this rank.
        stop_requested: whether the trial asked to save and end.
        data_seconds: for how much of it this rank has waited for its data.
    """

    batches_trained: int
    metrics: dict[str, Any]
    seconds: float
    stop_requested: bool
    data_seconds: float = 0.0


class RunValidation(Request):
    """Validate on the whole validation set."""


class Validated(Result):
    """A validation is over.

    Attributes:
        metrics: reduced over all ranks, the same on every rank.
        seconds: wall time of the validation on this rank.
        stop_requested: whether the trial asked to save and end.
        is_broken_off: whether it ended early, without metrics, because the run was asked to stop.
    """

    metrics: dict[str, Any]
    seconds: float
    stop_requested: bool
    is_broken_off: bool = False


class SaveCheckpoint(Request):
    """Write this rank's shards and state to its staging folder."""

    uuid: str


class Saved(Result):
    """The rank's state is staged; training may go on.

    Attributes:
        staging: the folder it is staged in.
        writes_run_files: whether the rank writes files for TensorBoard, to upload with the run.
        stop_requested: whether the trial has asked, on this rank, to save and end.
    """

    staging: str
    seconds: float
    writes_run_files: bool = False
    stop_requested: bool = False


class PersistCheckpoint(Request):
    """Upload what this rank has staged for checkpoint `uuid`, and what it wrote for TensorBoard."""

    lane: ClassVar[Lane] = "io"
    uuid: str


class Persisted(Result):
    """The rank's files are stored whole, unless one of these says why not.

    Attributes:
        problem: how the storage failed; asking again may help: what was staged is still there.
        mistake: why they cannot be a checkpoint's files; asking again would not help.
    """

    files: list[FileEntry]
    seconds: float
    problem: str | None = None
    mistake: str | None = None


class ReleaseStaging(Request):
    """Checkpoint `uuid` is committed: drop what was staged for it."""

    lane: ClassVar[Lane] = "io"
    uuid: str


class RunHook(Request):
    """Call `hook` on every callback of the trial.

    `arguments` are those that the driver knows; a rank adds those that only it knows (metrics of
    the last workload, its own staging folder).
    """

    hook: str
    arguments: dict[str, Any] = {}


class HookDone(Result):
    """The callbacks have run."""

    stop_requested: bool


class FinishRunFiles(Request):
    """Training is over: stop the profiler, and upload what is left of the files for TensorBoard."""


class RunFilesStored(Result):
    """The rank's files for TensorBoard are stored.

    Attributes:
        files: how many were new or had changed.
        problem: why they could not be stored, when they could not.
    """

    files: int
    problem: str | None = None


class Shutdown(Request):
    """Close everything and exit."""


AnyRequest = (
    Ping
    | BuildTrial
    | FetchCheckpoint
    | BuildLoaders
    | TrainBatches
    | RunValidation
    | SaveCheckpoint
    | PersistCheckpoint
    | ReleaseStaging
    | RunHook
    | FinishRunFiles
    | Shutdown
)
AnyResult = (
    Done
    | TrialBuilt
    | Fetched
    | LoadersBuilt
    | Trained
    | Validated
    | Saved
    | Persisted
    | HookDone
    | RunFilesStored
)
