"""The versions that must be the same on all nodes of a run."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping

PACKAGES = ("trialflow", "torch", "deepspeed")


def own_versions() -> dict[str, str]:
    """The versions of Python and of `PACKAGES` here; ``none`` for a missing package."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "none"
    return versions


def describe_difference(seen: Mapping[str, str], expected: Mapping[str, str]) -> str | None:
    """The differences from the expected versions, or None."""
    different = [
        f"{name} {seen.get(name, 'none')} instead of {version}"
        for name, version in expected.items()
        if seen.get(name) != version
    ]
    return ", ".join(different) or None
