"""The result of one check of `trialflow doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CheckStatus = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        status: ``fail``: training is impossible; ``warn``: a part of it is limited.
        advice: the action to take; empty if none is needed.
        node: the node that was checked; empty for this machine, or for all nodes together.
    """

    subject: str
    status: CheckStatus
    found: str
    advice: str = ""
    node: str = ""

    def __str__(self) -> str:
        node = f"{self.node}: " if self.node else ""
        advice = f": {self.advice}" if self.advice else ""
        return f"{self.status:<4}  {self.subject:<12} {node}{self.found}{advice}"
