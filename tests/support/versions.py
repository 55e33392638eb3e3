"""Installed versions of packages, in a test."""

from __future__ import annotations

from importlib import metadata

import pytest


def set_version(
    monkeypatch: pytest.MonkeyPatch, package: str, version: str, bounds: str | None = None
) -> None:
    """Have a package's metadata say another version, and trialflow's the `bounds`."""
    real, requires = metadata.version, metadata.requires
    monkeypatch.setattr(metadata, "version", lambda of: version if of == package else real(of))
    if bounds is not None:
        others = [each for each in requires("trialflow") or [] if not each.startswith(package)]
        monkeypatch.setattr(metadata, "requires", lambda _: [*others, bounds])
