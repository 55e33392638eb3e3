"""A section of the experiment file: a pydantic model with plain error messages.

Every section replaces pydantic's messages when it is validated. So `error_lines`,
``str(ValidationError)`` and Prefect show the same text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.functional_validators import ModelWrapValidatorHandler
from pydantic_core import ErrorDetails
from typing_extensions import Self

from trial_core.config.error_text import (
    Problem,
    closest_match,
    did_you_mean,
    error_message,
    format_value,
    type_name,
    validation_error,
    validation_errors,
    warn_ignored,
)


class Section(BaseModel):
    """A part of an experiment file; refuses unknown fields. A field's name is its default title."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    yaml_path: ClassVar[str] = ""  # the section's path in the file
    # Fields of Determined that have no effect here, each with the reason.
    ignored: ClassVar[Mapping[str, str]] = {}
    holds_secrets: ClassVar[bool] = False  # True if its errors must not show values

    @model_validator(mode="wrap")
    @classmethod
    def _validate_with_plain_errors(
        cls, data: Any, handler: ModelWrapValidatorHandler[Self]
    ) -> Self:
        if isinstance(data, cls):
            return handler(data)
        try:
            prepared = cls.prepare(data)
        except RecursionError:
            raise validation_error("nested too deeply") from None
        try:
            return handler(prepared)
        except RecursionError:
            raise validation_error("nested too deeply") from None
        except ValidationError as error:
            raise validation_errors(cls._problems(error.errors(include_url=False))) from None

    @classmethod
    def prepare(cls, data: Any) -> dict[str, Any]:
        """The section as pydantic validates it: without ignored fields and meaningless nulls."""
        if not isinstance(data, Mapping):
            raise validation_error(f"expected a mapping, got {cls._format(data)}")
        given: dict[str, Any] = {}
        for key, value in data.items():
            name = str(key)
            if name in cls.ignored:
                if value is not None:
                    path = f"{cls.yaml_path}.{name}" if cls.yaml_path else name
                    warn_ignored(f"{path}: ignored: {cls.ignored[name]}")
            elif value is not None or cls._takes_null(name):
                given[name] = value
        return given

    @classmethod
    def _takes_null(cls, name: str) -> bool:
        """Return whether null is a value with a meaning for a field.

        If not, null is dropped: Determined's files have many nulls that mean the default.
        """
        field = cls.model_fields.get(name)
        if field is None:
            return True  # keep an unknown field: validation refuses it
        return type(None) in get_args(field.annotation) and field.default is not None

    @classmethod
    def unchecked(cls, experiment: Mapping[str, Any]) -> Self:
        """This section of an experiment that is plain data, with its defaults.

        Nothing is refused: an experiment file was checked when it was read, and the configuration
        of a script or of a debugged trial may have any fields. Values get their default's type.
        """
        given = experiment.get(cls.yaml_path) or {}
        values: dict[str, Any] = {}
        for name, field in cls.model_fields.items():
            if (value := given.get(name)) is not None:
                values[name] = value if field.default is None else type(field.default)(value)
            elif name in given and cls._takes_null(name):
                values[name] = None
        return cls.model_construct(**values)

    @classmethod
    def hint(cls, unknown: str) -> str:
        """The text after ``unknown field``: a similar name, if there is one."""
        return did_you_mean(unknown, list(cls.model_fields))

    @classmethod
    def _format(cls, value: object) -> str:
        return type_name(value) if cls.holds_secrets else format_value(value)

    @classmethod
    def _problems(cls, errors: Sequence[ErrorDetails]) -> list[Problem]:
        unknown = [str(line["loc"][0]) for line in errors if line["type"] == "extra_forbidden"]
        misspelt = {closest_match(name, list(cls.model_fields)) for name in unknown}
        return [
            (line["loc"], cls._problem(line))
            for line in errors
            # A misspelt field is one mistake, not two.
            if not (line["type"] == "missing" and line["loc"][0] in misspelt)
        ]

    @classmethod
    def _problem(cls, details: ErrorDetails) -> str:
        message = error_message(details, cls._format)
        if len(details["loc"]) != 1:
            return message
        name = str(details["loc"][0])
        if details["type"] == "extra_forbidden":
            return message + cls.hint(name)
        if details["type"] == "missing" and (examples := cls.model_fields[name].examples):
            return f"{message}; for example {name}: {_as_yaml(examples[0])}"
        return message


def _as_yaml(example: Any) -> str:
    if isinstance(example, dict):
        return "{" + ", ".join(f"{key}: {value}" for key, value in example.items()) + "}"
    return str(example)
