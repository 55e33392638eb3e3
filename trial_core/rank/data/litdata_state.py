"""Completes the state that litdata's loader loads only in part. As of litdata 0.2.76."""

from __future__ import annotations

from typing import Any

from trial_core.errors import TrialError


def complete_litdata_state(loader: Any) -> None:
    """Let litdata's loader save right states after `load_state_dict`. Call before `iter`.

    With workers, the datasets of this process, from which `state_dict` takes its values, are not
    set; only their copies in the workers are. So the next state names the first epoch, and a resume
    from it has that epoch's order. After another division of the data (ranks, workers or batch
    size) it also counts only the data taken since, which cannot be mended here.

    Args:
        loader: any training loader; others than litdata's are left alone.

    Raises:
        TrialError: the loader has workers and divides the rest of the pass anew.
    """
    if not any(cls.__module__.startswith("litdata.") for cls in type(loader).__mro__):
        return
    if loader.num_workers and getattr(loader.dataset, "_elastic_drop_first", None) is not None:
        raise TrialError(
            f"{type(loader).__name__} of litdata has num_workers={loader.num_workers} and a state "
            "of another number of ranks or workers, or of another batch size; the next checkpoint "
            "would repeat samples. Resume with the numbers of the run that saved it, or with "
            "num_workers=0 until a checkpoint of the next pass over the data"
        )
    # A dataset that combines others has them in `_datasets`.
    for dataset in (loader.dataset, *getattr(loader.dataset, "_datasets", ())):
        if hasattr(dataset, "current_epoch"):
            dataset.current_epoch = loader.current_epoch
