"""Compares the installed versions of other packages with the ones that trialflow works with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement

PACKAGE = "trialflow"


@dataclass(frozen=True)
class OutOfBounds:
    """A package whose installed version trialflow's own metadata does not allow."""

    installed: str
    expected: str  # in pip's form: ``deepspeed<0.20,>=0.19.8``
    is_older: bool  # True if it is too old for trialflow; else it is newer than the versions tried

    def __str__(self) -> str:
        name = Requirement(self.expected).name
        return f"{name} {self.installed} is installed, and trialflow needs {self.expected}"


def dependencies() -> Iterator[Requirement]:
    """The packages that trialflow always needs, with the bounds of their versions."""
    for each in map(Requirement, metadata.requires(PACKAGE) or ()):
        if each.marker is None or each.marker.evaluate({"extra": ""}):
            yield each


def out_of_bounds(package: str) -> OutOfBounds | None:
    """How a package's version is out of bounds; None if it is not, or is not installed."""
    needed = next((each for each in dependencies() if each.name == package), None)
    try:
        installed = metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
    if needed is None or needed.specifier.contains(installed, prereleases=True):
        return None
    refusing = [each for each in needed.specifier if not each.contains(installed, prereleases=True)]
    is_older = any(each.operator.startswith((">", "~", "==")) for each in refusing)
    return OutOfBounds(installed, f"{needed.name}{needed.specifier}", is_older)
