"""The timeouts of collectives, in ranks that a driver watches."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import deepspeed
import pytest
import torch.distributed
import torch.distributed.distributed_c10d as c10d

from trial_core.rank.collectives import rendezvous


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What DeepSpeed is called with. NCCL is compiled in."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(deepspeed, "init_distributed", given.update)
    monkeypatch.setattr(c10d, "default_pg_timeout", timedelta(minutes=30))
    monkeypatch.setattr(c10d, "default_pg_nccl_timeout", timedelta(minutes=10))
    monkeypatch.delenv(rendezvous.TIMEOUT_VARIABLE, raising=False)
    return given


def test_no_collective_ends_a_rank_before_the_driver_does(given: dict[str, Any]) -> None:
    """The first process group, and those that DeepSpeed makes later."""
    rendezvous.init_distributed(with_deepspeed=True)
    assert given == {"timeout": timedelta(days=7)}
    for backend in ("nccl", "gloo"):
        assert c10d._get_default_timeout(c10d.Backend(backend)) == timedelta(days=7)


def test_the_users_timeout_stays(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """DEEPSPEED_TIMEOUT."""
    monkeypatch.setenv(rendezvous.TIMEOUT_VARIABLE, "30")
    rendezvous.init_distributed(with_deepspeed=True)
    assert given == {}
    assert c10d._get_default_timeout(c10d.Backend("nccl")) == timedelta(minutes=10)


def test_deepspeed_stays_out_of_other_trials(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its communication compiles an operator; torch's is initialised, with the same timeout."""
    torchs: dict[str, Any] = {}
    monkeypatch.setattr(
        torch.distributed,
        "init_process_group",
        lambda backend, timeout: torchs.update(backend=backend, timeout=timeout),
    )
    rendezvous.init_distributed(with_deepspeed=False)
    assert given == {}
    assert torchs == {"backend": "gloo", "timeout": timedelta(days=7)}
