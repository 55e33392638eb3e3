"""Says what to do about a DeepSpeed config that DeepSpeed rejects."""

from __future__ import annotations

import re

_UNEQUAL = re.compile(r"train_batch_size is not equal .* (\d+) != (\d+) \* (\d+) \* (\d+)$", re.S)
_EMPTY = re.compile(r"^(Micro batch size per gpu|Gradient accumulation steps): 0 has to be")


def rejection(error: Exception) -> str:
    """The message for an error of DeepSpeed about a config: ours where we know it, else its own."""
    text = str(error)
    if found := _UNEQUAL.search(text):
        return _unequal(*map(int, found.groups()))
    if found := _EMPTY.search(text):
        what = "micro-batch of a rank" if found[1].startswith("Micro") else "batch"
        unit = "sample" if found[1].startswith("Micro") else "micro-batch"
        return (
            f"the DeepSpeed config's train_batch_size is too small: the {what} has no {unit}. "
            "train_batch_size counts the samples of all ranks together. Increase it, or reduce "
            "resources.slots_per_trial or train_micro_batch_size_per_gpu"
        )
    return f"DeepSpeed rejects the trial's configuration: {text}"


def _unequal(train: int, micro: int, accumulation: int, ranks: int) -> str:
    seen = (
        f"the DeepSpeed config's train_batch_size is {train}, but {ranks} data-parallel ranks "
        f"train {micro * accumulation * ranks} samples a batch: {micro} (micro-batch) x "
        f"{accumulation} (gradient accumulation) each. train_batch_size counts the samples of all "
        "ranks. "
    )
    if train % ranks:
        return seen + (
            f"Choose one that {ranks} divides, or a resources.slots_per_trial that divides {train}"
        )
    return seen + (
        "Correct one of train_batch_size, train_micro_batch_size_per_gpu and "
        "gradient_accumulation_steps, or leave one out: DeepSpeed computes it"
    )
