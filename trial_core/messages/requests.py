"""The driver's requests and the ranks' results.

Every rank gets the same `Request` and returns the `Result` that follows it here, or `Done`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from trial_core.checkpoint.manifest import FileEntry, Topology
from trial_core.checkpoint.resume_point import Restore
from trial_core.checkpoint.store import StorageSpec
from trial_core.schedule.units import EpochLength
from trial_core.schedule.work import Work

Lane = Literal["compute", "io"]


class Message(msgspec.Struct, tag=True, kw_only=True):
    """Base of all messages; the tag is the class's name."""


class Request(Message):
    """A workload for one lane of all ranks. It belongs to a stage, which people know by the name of
    its Prefect task, if it has one."""

    lane: ClassVar[Lane] = "compute"
    stage: ClassVar[str]

    @property
    def title(self) -> str:
        return self.stage


class Result(Message):
    """A rank's reply to a request."""


class MayStop(Result):
    """The result of a request during which the trial on this rank may request a stop."""

    stop_requested: bool = False
    stop_reason: str | None = None


class NonFinite(msgspec.Struct, frozen=True):
    """Where a metric of a train-workload was NaN or infinite on a rank."""

    first: int  # index of the first such batch
    # Index of the batch from which it was so until the workload's end; None if the last batch's
    # value was finite.
    since: int | None


class Done(Result):
    """The request is done, and there is nothing else to report."""


class Ping(Request):
    """Do nothing, and reply. Measures the channel."""

    stage: ClassVar[str] = "a check of the channel"


class BuildTrial(Request):
    """Import the entrypoint, initialise torch.distributed, and construct the user's trial."""

    stage: ClassVar[str] = "build-trial"
    trial: str
    experiment: dict[str, Any]  # the validated experiment configuration, as plain data
    run_dir: str  # the run's folder on the driver's machine: logs, staging, restored files
    storage: StorageSpec
    # Of the engines; 0: as many as in a rank's batch; None: as configured.
    micro_batch_samples: int | None = None


class TrialBuilt(Result):
    """The trial exists."""

    hooks: list[str]  # the callback hooks that some callback of the trial overrides
    topology: Topology
    batch_samples: int  # samples in one batch on all ranks (`train_batch_size`)
    versions: dict[str, str]  # of the libraries that the rank uses


class FetchCheckpoint(Request):
    """Download and verify a checkpoint's files; the ranks of a machine share them."""

    lane: ClassVar[Lane] = "io"
    stage: ClassVar[str] = "fetch-checkpoint"
    uuid: str
    files: list[FileEntry]  # all files of the checkpoint
    # The topology that saved it; only files that this machine's ranks need are downloaded. None:
    # all files.
    saved_by: Topology | None = None
    restore: Restore = "everything"


class Fetched(Result):
    """The files are on this machine, unless `damage` or `problem` is set."""

    damage: str | None = None  # how the files differ from the manifest
    problem: str | None = None  # how the storage failed; a retry may succeed


class BuildLoadersAndRestore(Request):
    """Build the data loaders, and restore `checkpoint` if there is one."""

    stage: ClassVar[str] = "build-loaders"
    batches_trained: int  # where training begins or continues
    checkpoint: str | None  # uuid of a checkpoint that has been fetched
    restore: Restore = "everything"
    saved_by: Topology | None = None  # the topology that saved it; None for the present one
    epoch: EpochLength | None = None  # the length of its epochs; None if that is not known
    # Maximum `evaluate_batch` calls per validation; None for no limit.
    validation_limit: int | None = None
    keep: list[str] = []  # settings that stay as in the checkpoint: ``optimizer``, ``optimizer.lr``
    # False if neither the experiment nor the code has changed since the checkpoint: values stay.
    compares: bool = True


class RestoredSettings(msgspec.Struct, frozen=True):
    """The settings of optimizers and the like that were built otherwise for the checkpoint."""

    # Those whose new values count, for people: ``optimizer 0 (AdamW): lr 0.001 -> 0.0001``.
    new: list[str] = []
    kept: list[str] = []  # those that stay as in the checkpoint, with the reason
    # False if the checkpoint has no record of its settings: all of its values stay.
    is_known: bool = True
    # Settings that were to stay as in the checkpoint, and do not, with the reason.
    not_kept: list[str] = []


class ReadyToTrain(Result):
    """The loaders are built, the checkpoint is restored: the rank is ready to train."""

    epoch: EpochLength | None  # None if the training loader has no length
    restore_seconds: float = 0.0
    # True if the training loader has the engine's micro-batch size, which may then be changed; None
    # on a rank that needs no data.
    loads_micro_batches: bool | None = None
    # The settings that have changed since the checkpoint.
    settings: RestoredSettings = RestoredSettings()
    warnings: list[str] = []  # about the data, for people


class TrainBatches(Request):
    """Train until batch `until` of the trial."""

    stage: ClassVar[str] = "train-workload"
    until: int
    watches_weights: bool = False  # True to warn of weights that are not trained


class WeightsSeen(msgspec.Struct, frozen=True):
    """What became of a rank's parameters with ``requires_grad`` in a workload, by their names."""

    with_gradient: list[str]
    without_gradient: list[str]
    has_changed: bool  # False if none of them has changed, although an optimizer was to step


class Trained(MayStop, kw_only=True):
    """A train-workload has ended. What it says of a rank's time and data is of this rank alone."""

    batches_trained: int  # the trial's; fewer than `until` if a stop was requested
    # Averaged over the workload's batches and all ranks; the same on every rank.
    metrics: dict[str, Any]
    seconds: float
    data_seconds: float = 0.0  # waited for data
    forward_seconds: float = 0.0  # of a forward pass; 0 if unknown
    copy_seconds: float = 0.0  # waited for the copies of a snapshot
    # The next batch's, one per optimizer; None for an engine that has none.
    learning_rates: list[float | None] = []
    non_finite: dict[str, NonFinite] = {}  # metrics that were NaN or infinite in some batch
    scaled_steps: int = 0  # optimizer steps with a loss scaler
    skipped_steps: int = 0  # those that it skipped
    samples: int = 0  # see `trial_core.schedule.work.samples_of`
    work: Work = Work()  # in one sample, as far as this rank knows it
    device: str = ""  # the accelerator's name; empty for the CPU
    peak_memory_bytes: int = 0  # since the rank was started
    weights: WeightsSeen | None = None  # if that was asked for


class NameMetrics(Request):
    """Find the names of the validation metrics, without a validation."""

    stage: ClassVar[str] = "check-metrics"


class MetricsNamed(Result):
    """The names of the validation metrics; None if one batch does not reveal them. `may_be_more`: a
    callback may add others in on_validation_end."""

    names: list[str] | None
    may_be_more: bool = False


class RunValidation(Request):
    """Validate on the whole validation set."""

    stage: ClassVar[str] = "validate"


class Validated(MayStop, kw_only=True):
    """A validation has ended."""

    metrics: dict[str, Any]  # reduced over all ranks, the same on every rank
    seconds: float
    # True if it ended early, without metrics, because of a stop request.
    is_broken_off: bool = False


class SaveCheckpoint(Request):
    """Write this rank's shards and state to its staging folder."""

    stage: ClassVar[str] = "checkpoint-save"
    uuid: str


class Saved(MayStop, kw_only=True):
    """The rank's state is staged; training may continue. `writes_run_files`: the rank has
    TensorBoard files to upload."""

    staging: str
    seconds: float
    writes_run_files: bool = False


class PersistCheckpoint(Request):
    """Upload this rank's staged files of checkpoint `uuid`, and its TensorBoard files. `shared`: as
    for `upload_staged`."""

    lane: ClassVar[Lane] = "io"
    stage: ClassVar[str] = "checkpoint-upload"
    uuid: str
    shared: list[FileEntry] = []


class Persisted(Result):
    """The rank's files are stored, unless `problem` or `mistake` is set."""

    files: list[FileEntry]
    seconds: float
    # How the storage failed; a retry may succeed, since the staged files still exist.
    problem: str | None = None
    # Why the files cannot be part of a checkpoint; a retry would fail the same way.
    mistake: str | None = None
    # True if that is because the trial has changed weights before they were copied.
    has_changed: bool = False


class ReleaseStaging(Request):
    """Delete the staged files of checkpoint `uuid`, which is committed, or was refused."""

    lane: ClassVar[Lane] = "io"
    stage: ClassVar[str] = "checkpoint-upload"
    uuid: str
    # Why it cannot be committed, for the script that has stored it; empty if it is.
    refusal: str = ""


class RunHook(Request):
    """Call `hook` on every callback of the trial.

    `arguments` has the ones that the driver knows. The rank adds the others: the metrics of the
    last workload, its staging folder.
    """

    stage: ClassVar[str] = "callbacks"
    hook: str
    arguments: dict[str, Any] = {}

    @property
    def title(self) -> str:
        return f"{self.stage} {self.hook}"


class HookDone(MayStop, kw_only=True):
    """The callbacks have run. `metrics`: as they have left them, from rank 0 after
    on_validation_end."""

    metrics: dict[str, Any] | None = None


class FinishRunFiles(Request):
    """Stop the profiler and upload the remaining TensorBoard files, at the end of training."""

    stage: ClassVar[str] = "upload-run-files"


class RunFilesStored(Result):
    """The rank's new and changed TensorBoard files, of which `files` is the number, are stored,
    unless `problem` says why not."""

    files: int
    problem: str | None = None


class Length(msgspec.Struct):
    """A length or period of training; several numbers are the points where something is due."""

    unit: Literal["batches", "epochs"]
    value: int | list[int]


class RunScript(Request):
    """Run the Core API script that `BuildTrial` named, to its end; from a fetched checkpoint, if it
    resumes. The trial's batches and its best searcher metric are those at that checkpoint.
    `pause_at`: where the script is to validate, save and end; None: at the experiment's length."""

    stage: ClassVar[str] = "run-script"
    checkpoint: str | None
    batches_trained: int
    best_metric: float | None = None
    pause_at: Length | None = None


class ScriptEnded(Result):
    """The script has ended without an error. `was_preempted`: it was told on this rank to save and
    end. The other fields are as in `Saved` and `Trained`."""

    was_preempted: bool
    writes_run_files: bool = False
    peak_memory_bytes: int = 0


class AttachTrial(Request):
    """Take over the trial of the script that is in `Trainer.fit`. The result is `TrialBuilt`."""

    stage: ClassVar[str] = "attach-trial"
    trial: str
    run_dir: str
    storage: StorageSpec


class EndFit(Request):
    """Let `Trainer.fit` return the `TrialResult` with these fields, as plain data."""

    stage: ClassVar[str] = "the end of fit"
    result: dict[str, Any]


class Shutdown(Request):
    """Close everything and exit. A rank that has joined leaves, and its program goes on."""

    stage: ClassVar[str] = "the shutdown"


AnyRequest = (
    Ping
    | BuildTrial
    | FetchCheckpoint
    | BuildLoadersAndRestore
    | TrainBatches
    | NameMetrics
    | RunValidation
    | SaveCheckpoint
    | PersistCheckpoint
    | ReleaseStaging
    | RunHook
    | FinishRunFiles
    | RunScript
    | AttachTrial
    | EndFit
    | Shutdown
)
AnyResult = (
    Done
    | TrialBuilt
    | Fetched
    | ReadyToTrain
    | Trained
    | MetricsNamed
    | Validated
    | Saved
    | Persisted
    | HookDone
    | RunFilesStored
    | ScriptEnded
)
