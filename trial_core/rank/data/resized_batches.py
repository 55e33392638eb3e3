"""Where a trial continues in its data if its batches have another size, or its data another length.

The place in the data, lengths and schedules are counted in batches. So batches of another size can
only begin where a batch of that size would begin, which the end of an epoch always is. From there
epochs have another length, and are counted on: earlier ones keep their numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
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
    done = trained // now
    if has_other_length(epoch, then, sizes):
        done = min(done, epoch.batches_until(1) - 1)
    return replace(epoch, first_epoch=epochs, first_batch=batches_trained - done)


def has_other_length(
    epoch: EpochLength, then: EpochLength, sizes: tuple[int, int] = (1, 1)
) -> bool:
    """Whether a pass over the data is longer or shorter than it was, with these sizes of a batch.

    The same samples may make up less than one micro-batch more or less in micro-batches of another
    size.
    """
    of_micro_batch = [
        Fraction(size, each.micro_batches_per_batch)
        for size, each in zip(sizes, (then, epoch), strict=True)
    ]
    before, now = then.micro_batches * of_micro_batch[0], epoch.micro_batches * of_micro_batch[1]
    return abs(now - before) >= max(of_micro_batch)


def with_other_length(epoch: EpochLength, then: EpochLength, batches_trained: int) -> EpochLength:
    """The length of an epoch of other data in batches of the same size, counted on.

    As many batches of the present epoch are done as before, but at least one is left, which ends
    it. If epochs do not end with batches, less than a batch comes again.
    """
    epochs, micro_batches = then.place(batches_trained)
    done = min(micro_batches // then.micro_batches_per_batch, epoch.batches_until(1) - 1)
    return replace(epoch, first_epoch=epochs, first_batch=batches_trained - done)


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
