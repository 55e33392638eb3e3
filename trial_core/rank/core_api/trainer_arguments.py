"""Compares the arguments of Hugging Face's Trainer with those that a checkpoint was made with.

The Trainer restores its optimizer and schedule itself, and does not say what counts then. This
module says it, and refuses what would end in a KeyError or leave samples out. It changes nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from trial_core.common.text_format import (
    clean,
    is_finite_number,
    plural,
    setting,
    shortened,
    told_apart,
)
from trial_core.errors import CheckpointError
from trial_core.messages import RestoredSettings
from trial_core.rank.state_files.built_settings import FILE

_OF_OPTIMIZER = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
_OF_SCHEDULE = ("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio")
_OF_LENGTH = ("max_steps", "num_train_epochs")
_OF_DATA = ("seed", "data_seed", "data_length")
_OTHERS = ("max_grad_norm", "label_smoothing_factor")

_WITH_STATE = frozenset({"reduce_lr_on_plateau", "greedy"})
"""The kinds of schedule that keep their arguments in their state. The others are functions."""

_NEW_TRIAL = (
    "or begin a new trial with the checkpoint's weights: `trialflow checkpoints download` it, and "
    "give its folder to from_pretrained"
)


class TrainerRecord(msgspec.Struct, frozen=True):
    """What a Trainer was given, as plain data.

    Attributes:
        arguments: of its `TrainingArguments`, those that count for a resume, and ``data_length``.
            Those are missing that it does not use, such as the rate of a given optimizer.
        optimizer: the class of its optimizer, with its package; None if it is not known before.
        rank_samples: that a rank trains on in a step.
        step_samples: that all ranks do.
        epoch_steps: the steps of an epoch; None before its loader is built.
    """

    arguments: dict[str, Any]
    optimizer: str | None
    rank_samples: int
    step_samples: int
    epoch_steps: int | None = None

    @property
    def samples_of_a_step(self) -> float:
        """Samples of a step, on average: the last one of an epoch may have fewer."""
        samples, steps = self.arguments.get("data_length"), self.epoch_steps
        return min(self.step_samples, samples / steps) if samples and steps else self.step_samples

    def with_loader(self, loader: Any, args: Any, state: Any) -> TrainerRecord:
        """The record with the steps of an epoch, which are counted as the Trainer does."""
        try:
            batches = len(loader)
        except TypeError:  # it has no length: all is one epoch
            return msgspec.structs.replace(self, epoch_steps=int(state.max_steps))
        steps = max(-(-batches // args.gradient_accumulation_steps), 1)
        return msgspec.structs.replace(self, epoch_steps=steps)

    def write(self, folder: Path) -> None:
        """Write it into the Trainer's folder of a checkpoint."""
        (folder / FILE).write_text(json.dumps(msgspec.to_builtins(self), indent=1))


def record_of(trainer: Any, built_by_transformers: bool) -> TrainerRecord:
    """The record of a Trainer that is about to train, `built_by_transformers` if its class has not
    its own ``create_optimizer``."""
    args = trainer.args
    names = [*_OF_LENGTH, *_OF_DATA, *_OTHERS]
    if trainer.optimizer is None:
        names += _OF_OPTIMIZER
    if trainer.lr_scheduler is None:
        names += _OF_SCHEDULE
    found = {name: _plain(getattr(args, name)) for name in names if hasattr(args, name)}
    with suppress(TypeError, NotImplementedError):  # a stream
        found["data_length"] = len(trainer.train_dataset)
    rank_samples = args.train_batch_size * args.gradient_accumulation_steps
    of_all = getattr(trainer, "get_total_train_batch_size", None)  # transformers 5
    return TrainerRecord(
        found,
        _optimizer_class(trainer) if built_by_transformers or trainer.optimizer else None,
        rank_samples,
        of_all(args) if of_all else rank_samples * args.world_size,
    )


def require_same_types(then: TrainerRecord, now: TrainerRecord) -> None:
    """Check, before the Trainer restores them, that optimizer and schedule are of the same class as
    in the checkpoint. Raises CheckpointError."""
    kinds = [("the optimizer (optim)", then.optimizer, now.optimizer)]
    schedules = [each.arguments.get("lr_scheduler_type") for each in (then, now)]
    if not _WITH_STATE.isdisjoint(map(str, schedules)):
        kinds.append(("lr_scheduler_type", schedules[0], schedules[1]))
    for kind, before, given in kinds:
        if before is not None and given is not None and before != given:
            was = shortened(str(before), 60)
            raise CheckpointError(
                f"{kind} was {was} when the checkpoint was saved, and is {given} now: they have "
                f"different states. Resume with {was}, {_NEW_TRIAL}"
            )


def require_same_place(then: TrainerRecord, now: TrainerRecord, args: Any, step: int) -> None:
    """Check, before the first batch, that the Trainer goes on with the next sample of the epoch.

    It skips as many steps of the present size as the checkpoint had trained. Other slots alone are
    not refused: a run may be moved; see `changes`. Raises CheckpointError.
    """
    skipped = _skipped(then, now, args, step)
    if skipped is None or then.rank_samples == now.rank_samples:
        return
    raise CheckpointError(
        f"a step had {then.step_samples} samples when the checkpoint was saved, and has "
        f"{now.step_samples} now (per_device_train_batch_size, gradient_accumulation_steps, "
        f"ranks): {skipped}. Resume with {then.step_samples} samples a step; or train the epoch "
        f"anew, with ignore_data_skip=True; {_NEW_TRIAL}"
    )


def changes(
    then: TrainerRecord, now: TrainerRecord, args: Any, step: int, optimizer: Any, scheduler: Any
) -> RestoredSettings:
    """What has changed since the checkpoint of `step`, and which values count, for people.

    `optimizer` and `scheduler` are the Trainer's, after its restore.
    """
    differing = {
        name: (then.arguments[name], value)
        for name, value in now.arguments.items()
        if name in then.arguments and then.arguments[name] != value
    }
    at_once: list[str] = []
    later: list[str] = []
    data: list[str] = []
    kept: list[str] = []
    unused: list[str] = []
    kind = now.arguments.get("lr_scheduler_type")  # None: the script has made its schedule
    is_deepspeeds = hasattr(_inner(scheduler), "last_batch_iteration")
    has_state = kind in _WITH_STATE and not is_deepspeeds
    for name, (old, new) in differing.items():
        before, given = (clean(each) for each in told_apart(old, new))
        text, stays = f"{name} {before} -> {given}", f"{name} stays {before} (not {given})"
        in_use = _in_use(name, optimizer, scheduler)
        if name in _OF_DATA:
            data.append(text)
        elif name in _OF_SCHEDULE or (name == "learning_rate" and (is_deepspeeds or has_state)):
            (kept if has_state else later).append(stays if has_state else text)
        elif name in _OF_LENGTH:
            (at_once if kind is None or has_state else later).append(text)
        elif in_use is None and name in _OF_OPTIMIZER:
            unused.append(text)
        elif in_use is None or _is_number(in_use, new):
            at_once.append(text)
        elif _is_number(in_use, old):
            kept.append(stays)
        else:
            unused.append(f"{text} (it has {setting(float(in_use))})")
    if then.step_samples != now.step_samples and not args.auto_find_batch_size:
        skipped = _skipped(then, now, args, step)
        text = f"samples of a step {then.step_samples} -> {now.step_samples}"
        at_once.append(f"{text}, and {skipped}" if skipped else text)
    base = "" if is_deepspeeds else " and with the checkpoint's base rate"
    return RestoredSettings(
        new=[
            *_line("Trainer", at_once),
            *_line(f"Trainer, its schedule after the next step{base}", later),
            *_line("training data, also for the rest of this epoch", data),
        ],
        kept=[
            *_line("Trainer", kept, ", because it restores its optimizer and schedule whole"),
            *_line("not used by the optimizer", unused),
        ],
    )


def _line(subject: str, texts: list[str], end: str = "") -> Iterator[str]:
    if texts:
        yield f"{subject}: {', '.join(texts)}{end}"


def _skipped(then: TrainerRecord, now: TrainerRecord, args: Any, step: int) -> str | None:
    """How far the Trainer's place in the epoch is from the right one; None if it is right."""
    if not then.epoch_steps or not now.epoch_steps or args.ignore_data_skip:
        return None
    if args.auto_find_batch_size or then.step_samples == now.step_samples:
        return None  # the Trainer itself takes the checkpoint's size of batches
    trained = step % then.epoch_steps * then.step_samples
    skips = step % now.epoch_steps * now.step_samples
    if trained == skips:
        return None
    what = "are left out" if skips > trained else "come twice"
    return f"{plural(abs(skips - trained), 'sample')} of the epoch {what}"


def _in_use(name: str, optimizer: Any, scheduler: Any) -> Any:
    """The value of an argument after a restore; None if optimizer and schedule have none."""
    groups = getattr(optimizer, "param_groups", None) or [{}]
    if name == "max_grad_norm":  # some of DeepSpeed's optimizers restore it
        return getattr(_with(optimizer, "clip_grad"), "clip_grad", None)
    if name == "learning_rate":
        bases = getattr(_inner(scheduler), "base_lrs", None)
        return bases[0] if bases else groups[0].get("lr")
    if name == "weight_decay":  # biases have none
        return max((each.get("weight_decay", 0.0) for each in groups), default=None)
    if name == "adam_epsilon":
        return groups[0].get("eps")
    betas = groups[0].get("betas")
    return betas[name == "adam_beta2"] if name.startswith("adam_beta") and betas else None


def _is_number(value: Any, other: Any) -> bool:
    """True for equal numbers. One in a tensor is a float32."""
    return is_finite_number(other) and math.isclose(float(value), other, rel_tol=1e-6)


def _with(part: Any, attribute: str) -> Any:
    """The optimizer within wrappers that has an attribute; None if none has."""
    while part is not None and not hasattr(part, attribute):
        part = getattr(part, "optimizer", None)
    return part


def _inner(scheduler: Any) -> Any:
    """The scheduler within accelerate's wrapper."""
    return getattr(scheduler, "scheduler", scheduler)


def _optimizer_class(trainer: Any) -> str | None:
    """``torch.AdamW``, the class that the Trainer will build; None if it does not say."""
    config = getattr(trainer.args, "hf_deepspeed_config", None)
    config = getattr(config, "config", None) or {}
    of_config = config.get("optimizer", {}).get("type")
    if of_config is not None:
        return f"deepspeed.{str(of_config).removesuffix('W')}"
    if (given := trainer.optimizer) is not None:
        return _name(type(getattr(given, "optimizer", given)))  # within accelerate's wrapper
    if getattr(trainer, "optimizer_cls_and_kwargs", None) is not None:
        return _name(trainer.optimizer_cls_and_kwargs[0])
    try:
        return _name(trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)[0])
    except (ImportError, ValueError):  # the Trainer raises it itself, when it builds it
        return None


def _name(built: Any) -> str | None:
    name = getattr(built, "__qualname__", None)
    return name and f"{built.__module__.partition('.')[0]}.{name}"


def _plain(value: Any) -> Any:
    """An argument as JSON holds it: an enum's value, a mapping as its text."""
    value = getattr(value, "value", value)
    if isinstance(value, Mapping):
        return json.dumps(value, sort_keys=True, default=str)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
