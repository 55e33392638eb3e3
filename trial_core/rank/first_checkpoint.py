"""Loads a run's first checkpoint back, to learn at once if it cannot be restored.

The ranks load it in place, right after they have staged it. Then weights, buffers and optimizers
are put back as they were, so that training does not depend on this. Values that differed are named,
because a resumed run would begin with them. The checkpoint is committed only after that.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from trial_core.checkpoint.layout import StoredPath
from trial_core.checkpoint.manifest import FileEntry
from trial_core.checkpoint.transfer.upload import StagedFile, staged_files
from trial_core.common.text_format import first_few
from trial_core.config.sections import CheckpointingConfig
from trial_core.errors import CheckpointError, CheckpointUnrestorable, SlotsError, TrialflowError
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.rank_state import capture_rng, read_rank_state, restore_rng
from trial_core.rank.state_files.safe_load import Reader
from trial_core.rank.state_files.state_guard import StateGuard
from trial_core.rank.trial.callback import overridden_hooks
from trial_core.rank.trial.trial_adapter import TrialAdapter

logger = logging.getLogger(__name__)

SMALL_BYTES = 256 * 2**20
"""The most that one rank may stage of a checkpoint that is loaded back by default."""

_STATE_HOOKS = frozenset({"on_checkpoint_save_start", "on_checkpoint_load_start"})


def load_back(
    adapter: TrialAdapter,
    distributed: DistributedContext,
    reader: Reader,
    staging: Path,
    settings: CheckpointingConfig,
) -> None:
    """Load the checkpoint that all ranks have just staged, if wanted. Collective.

    It calls no callback, and leaves the random generators as they are. Raises
    CheckpointUnrestorable if it cannot be restored, so that a restart would not help; another
    CheckpointError if the reason may be that another rank has failed.
    """
    rank, verify = distributed.get_rank(), settings.verify_first
    guard = StateGuard(adapter.modules, adapter.optimizers, adapter.left_out)
    staged = _staged(adapter, distributed, staging, verify, guard)
    every = distributed.allgather(staged)
    reasons = [each for each in every if isinstance(each, str)]
    if reasons:
        if rank == 0:
            level = logging.WARNING if verify else logging.DEBUG
            logger.log(level, "the first checkpoint is not loaded back: %s", reasons[0])
        return
    # Not mapped: the next snapshot overwrites these files.
    unmapped = Reader(reader.trusted, reader.classes, {"mmap": False})
    rng = capture_rng()
    with _links_to_files_read(adapter, rank, every) as folder, _explained():
        read_rank_state(folder, rank, unmapped)
        adapter.load(folder, unmapped, adapter.read_hook_state(folder, unmapped))
    changed = guard.put_back(rank == 0 or not adapter.shares_buffers)
    restore_rng(rng)
    differing = [
        f"{name} of rank {i}"
        for i, names in enumerate(distributed.allgather(changed))
        for name in names
    ]
    if rank == 0:
        logger.info("the first checkpoint was loaded back: it can be restored")
        if differing:
            logger.warning(
                "a run that resumes from the checkpoints of this one will differ from it: %d "
                "value(s) come back otherwise than they are here: %s. Training goes on with its "
                "own values",
                len(differing), first_few(differing),
            )  # fmt: skip


def _staged(
    adapter: TrialAdapter,
    distributed: DistributedContext,
    staging: Path,
    verify: bool | None,
    guard: StateGuard,
) -> list[StagedFile] | str:
    """This rank's files, once its state is kept; or why the checkpoint is not loaded back."""
    if distributed.local_size < distributed.get_size():
        return "its files are on several machines"
    if hooks := _STATE_HOOKS & overridden_hooks(adapter.callbacks):
        return f"a callback may change the state in {', '.join(sorted(hooks))}"
    if verify is None and not adapter.loads_plainly:
        return "the trial overrides load, or its engines write files in another way"
    try:
        files = staged_files(staging, distributed.get_rank())
    except CheckpointError as error:  # its upload reports it
        return str(error)
    size_bytes = max(sum(each.size_bytes for each in files), guard.size_bytes())
    if verify is None and size_bytes > SMALL_BYTES:
        return f"it has more than {SMALL_BYTES // 2**20} MiB per rank"
    try:
        guard.keep()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        return f"the state cannot be copied and put back: {error}"
    return files


@contextmanager
def _links_to_files_read(
    adapter: TrialAdapter, rank: int, every: Sequence[Sequence[StagedFile]]
) -> Iterator[Path]:
    """A folder with links to the files of all ranks that this rank reads in a restore."""
    staged = {each.path: Path(each.file).absolute() for files in every for each in files}
    entries = [
        FileEntry(
            path=StoredPath(each.path),
            size_bytes=each.size_bytes,
            digest=f"sha256:{0:064}",
            rank=by,
        )
        for by, files in enumerate(every)
        for each in files
    ]
    with TemporaryDirectory(prefix="trialflow-") as name:
        for entry in adapter.files_read(entries, adapter.topology(), "everything", [rank]):
            link = Path(name, entry.checked_path)
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(staged[entry.checked_path])
        yield Path(name)


@contextmanager
def _explained() -> Iterator[None]:
    """Explain an error in the block: the checkpoint cannot be restored."""
    try:
        yield
    except (ConnectionError, TimeoutError, SlotsError):
        raise  # of a collective
    except Exception as error:
        # torch's collectives raise RuntimeError when another rank has died.
        is_unclear = isinstance(error, RuntimeError) and not isinstance(error, TrialflowError)
        kind = CheckpointError if is_unclear else CheckpointUnrestorable
        raise kind(
            "the first checkpoint of this run cannot be restored, so it is not committed "
            f"({type(error).__name__}: {error}). Mend what the trial saves and loads, or what its "
            "DeepSpeed configuration says of checkpoints; to train without checkpoints that can be "
            "restored, set checkpointing.verify_first: false"
        ) from error
