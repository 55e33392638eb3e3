"""Where a trial continues in its data if a person has changed the size of its batches.

The place in the data, lengths and schedules are counted in batches. So batches of another size can
only begin where a batch of that size would begin, which the end of an epoch always is. From there
epochs have another length, and are counted on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trial_core.common.text_format import plural
from trial_core.errors import CheckpointError
from trial_core.schedule.units import EpochLength


def counted_on(
    epoch: EpochLength | None,
    then: EpochLength | None,
    sizes: tuple[int, int],
    batches_trained: int,
    saved: Mapping[str, Any] | None,
) -> EpochLength:
    """The length of an epoch with batches of another size, counted on from a checkpoint.

    Args:
        epoch, then: the length with the present batches, and the checkpoint's; None: not known.
        sizes: samples of a batch, in the checkpoint and now.
        saved: its place in the data, a `Loaders.state_dict`; None on a rank that needs no data.

    Raises:
        CheckpointError: no batch of the present size begins where the checkpoint's last one ends.
    """
    before, now = sizes
    if epoch is None or then is None:
        raise another_size(sizes, "the length of an epoch is not known")
    epochs, micro_batches = then.place(batches_trained)
    trained = micro_batches * before // then.micro_batches_per_batch
    if trained % now:
        why = (
            f"{plural(trained, 'sample')} of this epoch have been trained on, and make up no whole "
            f"number of batches of {now}"
        )
        raise another_size(sizes, why, then.next_whole(batches_trained))
    drawn = (batches_trained - then.first_batch) * then.micro_batches_per_batch
    if saved is not None and int(saved["drawn"]) * int(saved["ranks"]) != drawn:
        why = "its batches have not always taken the micro-batches that make up a batch"
        raise another_size(sizes, why)
    return replace(epoch, first_epoch=epochs, first_batch=batches_trained - trained // now)


def another_size(sizes: tuple[int, int], why: str, whole: int | None = None) -> CheckpointError:
    """The error; `whole` is the next batch that ends with an epoch, if that would help."""
    before, now = sizes
    way = f"{plural(before, 'sample')} a batch"
    if whole is not None:
        way += f" and a max_length of {whole} batches, where an epoch ends; then with {now}"
    return CheckpointError(
        f"a batch had {plural(before, 'sample')} when the checkpoint was saved, and has {now} now, "
        f"but {why}: samples would be left out or come twice. Resume with {way}. Or begin a new "
        "trial with the checkpoint's weights: searcher.source_checkpoint_uuid and "
        "searcher.source_weights_only=true"
    )
