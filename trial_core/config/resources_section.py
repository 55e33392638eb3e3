"""The section `resources`: the machines that a run uses."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from typing_extensions import Self

from trial_core.config import determined
from trial_core.config.error_text import format_value, validation_error, warn
from trial_core.config.section_base import Section
from trial_core.config.values import MAX_SECONDS, Flag, Seconds, Text

MAX_SLOTS = 1024
"""More than the driver's connections were measured with."""


def _slots(value: Any) -> Any:
    return value if value == "auto" else _slot_count(value, ' or "auto"')


def _slot_count(value: Any, alternative: str = "", advice: str = "") -> int:
    if type(value) is int and value > MAX_SLOTS:
        raise validation_error(f"expected at most {MAX_SLOTS}, got {format_value(value)}")
    if type(value) is int and value > 0:
        return value
    raise validation_error(
        f"expected a positive integer{alternative}, got {format_value(value)}{advice}"
    )


def _slots_schema(minimum: int) -> list[dict[str, Any]]:
    return [
        {"type": "integer", "title": "number", "minimum": minimum, "maximum": MAX_SLOTS},
        {"type": "string", "title": "auto", "const": "auto"},
    ]


_RANGE_SCHEMA = {
    "type": "object",
    "title": "range",
    "properties": {"min": {"type": "integer", "minimum": 1}, "max": {"type": "integer"}},
    "required": ["min", "max"],
    "additionalProperties": False,
}
_PORTS = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")


def _ports(value: Any) -> Any:
    match = _PORTS.fullmatch(str(value))
    first = int(match[1]) if match else -1
    last = int(match[2] or first) if match else -1
    if not 0 <= first <= last <= 65535 or isinstance(value, (bool, float)):
        raise validation_error(
            f'expected a port, or a range of ports such as "7600-7650", got {format_value(value)}'
        )
    return str(value)


def _address(value: Any) -> Any:
    try:
        if value is not None:
            ipaddress.ip_address(value)
    except ValueError:
        raise validation_error(
            f"expected an address of this machine, such as 10.0.0.5, got {format_value(value)}"
        ) from None
    return value


class SlotRange(Section):
    """As many slots as there are, within limits."""

    yaml_path: ClassVar[str] = "resources.slots_per_trial"

    min: Annotated[int, PlainValidator(_slot_count)]
    max: Annotated[int, PlainValidator(_slot_count)]

    @model_validator(mode="after")
    def _is_range(self) -> Self:
        if self.min > self.max:
            raise validation_error(f"min is {self.min}, and max only {self.max}")
        return self


def _slots_or_range(value: Any) -> Any:
    if isinstance(value, (Mapping, SlotRange)):
        return SlotRange.model_validate(value)
    if value == "auto":
        return value
    return _slot_count(value, ' or "auto"', "; 0 is one rank on the CPU")


def _plain_slots(value: int | str | SlotRange) -> Any:
    return value.model_dump() if isinstance(value, SlotRange) else value


class ChannelConfig(Section):
    """Where the driver of a run on several machines listens for their agents."""

    yaml_path: ClassVar[str] = "resources.channel"

    bind: Annotated[str | None, BeforeValidator(_address)] = Field(
        default=None,
        title="Bound address",
        description="The address of the driver's machine that it listens on. Default: all.",
    )
    ports: Annotated[str, PlainValidator(_ports), WithJsonSchema({"type": "string"})] = Field(
        default="0",
        description="The port that the driver listens on, or a range to choose from, such as "
        '"7600-7650". 0: any free port.',
    )
    advertise: Text | None = Field(
        default=None,
        title="Advertised address",
        description="The host name or address under which the nodes reach the driver, if that is "
        "another one, as behind NAT. Default: the bound address, or all of the machine.",
    )
    token_file: Path | None = Field(
        default=None,
        title="Token file",
        description="With engine: join, a file with the run's token. If it does not exist, the "
        "driver writes one. Default: join-token in the run's folder.",
    )

    @property
    def port_range(self) -> tuple[int, int]:
        """The first and the last port to try."""
        first, _, last = self.ports.partition("-")
        return int(first), int(last or first)


class RayConfig(Section):
    """The Ray cluster of engine: ray."""

    yaml_path: ClassVar[str] = "resources.ray"

    address: Text = Field(
        default="auto",
        description='The cluster: "auto" (the one of this machine, or of RAY_ADDRESS), host:port, '
        "or ray://host:port.",
    )
    insecure: Flag = Field(
        default=False,
        description="Also use a cluster without token authentication, on which everyone who "
        "reaches it can run programs.",
    )


class ResourcesConfig(Section):
    """The machines' resources that a run uses."""

    yaml_path: ClassVar[str] = "resources"
    ignored: ClassVar[Mapping[str, str]] = determined.IGNORED_RESOURCES

    slots_per_trial: Annotated[
        int | Literal["auto"] | SlotRange,
        PlainValidator(_slots_or_range),
        PlainSerializer(_plain_slots),
        WithJsonSchema({"anyOf": [*_slots_schema(0), _RANGE_SCHEMA]}),
    ] = Field(
        default=1,
        title="Slots per trial",
        description='Rank processes, each with one accelerator if the machine has any. "auto": one '
        "per accelerator of this machine, or two on the CPU if it has none. {min: 8, max: 32}: as "
        "many as there are, with the same batches; more or fewer when machines come and leave. 0: "
        "one rank on the CPU, as in Determined.",
    )
    accelerator: Literal["auto", "cpu"] = Field(
        default="auto",
        description='"auto": ranks compute on accelerators, or on the CPU if the machine has none. '
        '"cpu": they compute on the CPU.',
    )
    engine: Literal["auto", "local", "join", "ray", "slurm"] = Field(
        default="auto",
        description='What finds the machines. "local": ranks run on this machine. "join": on '
        'machines that run `trialflow join`. "ray": on a Ray cluster. "slurm": in the Slurm '
        'allocation that the run was started in. "auto": what '
        "TRIALFLOW_ENGINE names, else slurm in an allocation of several nodes, else local.",
    )
    slots_per_node: Annotated[
        int | Literal["auto"], PlainValidator(_slots), WithJsonSchema({"anyOf": _slots_schema(1)})
    ] = Field(
        default="auto",
        title="Slots per node",
        description='With several machines, how many ranks each has. "auto": one per accelerator, '
        "or two on the CPU.",
    )
    shrink_micro_batches: Flag = Field(
        default=True,
        title="Shrink micro-batches",
        description="Whether a DeepSpeedTrial that has no memory for one of its first 10 batches "
        "is launched again with smaller micro-batches, and as many more: train_batch_size stays. "
        "Only of a trial class whose DataLoader has the engine's micro-batch size.",
    )
    preload: bool = Field(
        default=True,
        description="Fork the ranks from a process that has imported PyTorch and DeepSpeed. They "
        "start faster, also after a crash, and share memory. False: each rank imports them.",
    )
    network: Text | None = Field(
        default=None,
        description="With several machines, where the ranks talk to each other: a network such as "
        "10.0.0.0/16, or an interface such as eth1. Default: that on which a node reaches the "
        "driver.",
    )
    max_wait_seconds: Seconds = Field(
        default=600.0,
        title="Longest wait",
        description="Seconds that a run waits for its machines, at its start and after it has "
        "lost one.",
    )
    replace_seconds: float = Field(
        default=60.0,
        ge=0,
        le=MAX_SECONDS,
        allow_inf_nan=False,
        title="Wait for a replacement",
        description="With a range of slots, seconds that a run waits for more machines before it "
        "trains with those that it has.",
    )
    peak_flops: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        title="Peak speed",
        description="Operations a second that one slot's device can do, in the number type that "
        "the trial multiplies in: 100 % of model FLOPs utilisation (MFU). Default: what the data "
        "sheet of an accelerator that trialflow knows says.",
    )
    channel: ChannelConfig = Field(
        default=ChannelConfig(),
        title="Channel",
        description="Where the driver listens for the nodes.",
    )
    ray: RayConfig = Field(
        default=RayConfig(), title="Ray", description="The Ray cluster of engine: ray."
    )

    @classmethod
    def prepare(cls, data: Any) -> dict[str, Any]:
        """Reads Determined's 0 slots, which is a trial without an accelerator."""
        given = super().prepare(data)
        slots = given.get("slots_per_trial")
        if type(slots) is int and slots == 0:
            warn("resources.slots_per_trial: 0 is read as one rank on the CPU, as in Determined")
            given |= {"slots_per_trial": 1, "accelerator": "cpu"}
        return given

    @property
    def min_slots(self) -> int | Literal["auto"]:
        """The fewest slots with which the run trains."""
        slots = self.slots_per_trial
        return slots.min if isinstance(slots, SlotRange) else slots

    @property
    def max_slots(self) -> int | Literal["auto"]:
        """The most slots that the run uses."""
        slots = self.slots_per_trial
        return slots.max if isinstance(slots, SlotRange) else slots
