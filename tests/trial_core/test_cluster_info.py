"""`get_cluster_info`, as scripts for Determined use it."""

from __future__ import annotations

import pytest

import trial_core


@pytest.mark.parametrize(("variable", "expected"), [(None, "latest"), ("0a1b", "0a1b"), ("", None)])
def test_the_latest_checkpoint_is_an_argument_of_fit(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, expected: str | None
) -> None:
    """By default a script that runs again continues; the environment may name a checkpoint."""
    monkeypatch.delenv("DET_LATEST_CHECKPOINT", raising=False)
    if variable is not None:
        monkeypatch.setenv("DET_LATEST_CHECKPOINT", variable)
    assert trial_core.get_cluster_info().latest_checkpoint == expected


def test_other_names_say_what_to_use() -> None:
    """An AttributeError, so that `hasattr` works."""
    info = trial_core.get_cluster_info()
    with pytest.raises(AttributeError, match=r"no 'user_data' .* use context.get_data_config\(\)"):
        info.user_data  # noqa: B018 - the access raises
    assert not hasattr(info, "master_url")
