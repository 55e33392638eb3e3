"""Says what to do about a DeepSpeed config that DeepSpeed rejects."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from traceback import walk_tb
from types import TracebackType
from typing import Any, get_args

from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from pydantic import BaseModel, ValidationError

from trial_core.config.error_text import did_you_mean
from trial_core.deepspeed.config_check import refusals, removals
from trial_core.deepspeed.op_builds import architecture_problem

_UNEQUAL = re.compile(r"train_batch_size is not equal .* (\d+) != (\d+) \* (\d+) \* (\d+)$", re.S)
CONFIG_ERRORS = (AssertionError, DeepSpeedConfigError, ValueError)
"""The types of DeepSpeed's errors about a config. A refused feature may raise others."""

_EMPTY = re.compile(r"^(Micro batch size per gpu|Gradient accumulation steps): 0 has to be")


def rejection(error: Exception) -> str | None:
    """The message for an error that DeepSpeed raised when it was given a config: ours where we know
    one, else DeepSpeed's. None if the error may have another cause."""
    config = _config_behind(error.__traceback__)
    obsolete = removals(config) if isinstance(error, DeepSpeedConfigError) else []
    if problems := refusals(config) + obsolete:
        return "; ".join(problems)
    if isinstance(error, ValidationError):  # without a config, of the trial's own model
        return "; ".join(_invalid(error, each, config) for each in error.errors() if config) or None
    if not isinstance(error, CONFIG_ERRORS):
        return None
    if _is_of_a_build(error.__traceback__) and (problem := architecture_problem()) is not None:
        return problem
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


def _is_of_a_build(traceback: TracebackType | None) -> bool:
    """True if the error comes from the code that compiles DeepSpeed's operators."""
    frames = walk_tb(traceback)
    return any(isinstance(each.f_locals.get("self"), OpBuilder) for each, _ in frames)


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


def _invalid(error: ValidationError, details: Any, config: Mapping[str, Any]) -> str:
    """One mistake in a section: its key and value, and what DeepSpeed expects."""
    path: Sequence[str] = [str(part) for part in details["loc"]]
    fields = _fields(error.title, path[:-1])
    section = _section(config, path, details["input"], fields)
    name, value = ".".join([*section, *path]) or error.title, details["input"]
    if details["type"] == "extra_forbidden":
        return (
            f"the DeepSpeed config has an unknown key {name} = {value!r}"
            f"{did_you_mean(path[-1], fields)}"
        )
    seen = f" = {value!r}" if path else ""
    reason = details["msg"].removeprefix("Assertion failed, ").removeprefix("Value error, ")
    return f"DeepSpeed rejects {name}{seen} in its config: {reason}"


def _section(
    config: Mapping[str, Any], path: Sequence[str], value: object, fields: Sequence[str]
) -> list[str]:
    """The name of the section in which `path` leads to `value`; empty if it is the config, or none.

    DeepSpeed validates each section on its own, so that pydantic does not know its name. A section
    that is rejected as a whole is known by its `fields`.
    """

    def leads(inside: Any) -> bool:
        if not path:
            return isinstance(inside, Mapping) and bool(inside) and {*inside} <= {*fields}
        for part in path:
            inside = inside.get(part) if isinstance(inside, Mapping) else None
        return bool(inside == value)

    if leads(config):
        return []
    return [key for key, inside in config.items() if leads(inside)][:1]


def _fields(model_name: str, path: Sequence[str]) -> list[str]:
    """The fields, and their aliases, of a section of one of DeepSpeed's models."""
    model = next(
        (each for each in _models(DeepSpeedConfigModel) if each.__name__ == model_name), None
    )
    for part in path:
        field = model.model_fields.get(part) if model is not None else None
        kinds = () if field is None else get_args(field.annotation) or (field.annotation,)
        classes = (each for each in kinds if isinstance(each, type))
        model = next((each for each in classes if issubclass(each, BaseModel)), None)
    fields = model.model_fields.items() if model is not None else ()
    return [each for name, field in fields for each in (name, field.alias) if each is not None]


def _models(model: type[BaseModel]) -> Sequence[type[BaseModel]]:
    return [each for child in model.__subclasses__() for each in (child, *_models(child))]


def _config_behind(traceback: TracebackType | None) -> Mapping[str, Any]:
    """The config with which DeepSpeed failed; empty if its frames have none."""
    found: Mapping[str, Any] = {}
    for frame, _ in walk_tb(traceback):
        for local in frame.f_locals.values():
            if isinstance(local, DeepSpeedConfig):
                found = getattr(local, "_param_dict", found)
    return found
