"""Which accelerator a rank computes on, with DeepSpeed's view of the hardware replaced: there is
no machine with several accelerators to test on."""

from __future__ import annotations

import pytest

from trial_core.context import RunInfo
from trial_core.controller import device, entrypoint
from trial_core.deepspeed import context as context_module
from trial_core.distributed import DistributedContext


class FakeAccelerator:
    """Two accelerators, the first of which is current until another is set, as with CUDA."""

    def __init__(self) -> None:
        self.current = 0

    def device_name(self, index: int | None = None) -> str:
        return "cuda" if index is None else f"cuda:{index}"

    def set_device(self, index: int) -> None:
        self.current = index

    def current_device_name(self) -> str:
        return f"cuda:{self.current}"


@pytest.fixture
def second_rank(monkeypatch: pytest.MonkeyPatch) -> DistributedContext:
    """Rank 1 of a machine with two accelerators."""
    fake = FakeAccelerator()
    monkeypatch.setattr(device, "get_accelerator", lambda: fake)
    monkeypatch.setattr(context_module, "get_accelerator", lambda: fake)
    return DistributedContext(
        rank=1, size=2, local_rank=1, local_size=2, cross_rank=0, cross_size=1
    )  # fmt: skip


def test_a_context_is_on_its_own_ranks_accelerator(second_rank: DistributedContext) -> None:
    """Rank 1 puts its batches where its model will be, not on the first accelerator."""
    device.claim_accelerator(second_rank.get_local_rank())
    info = RunInfo(trial="toy-0000beef", experiment={})
    context = context_module.DeepSpeedTrialContext(info, second_rank)
    assert str(context.device) == "cuda:1"


def test_the_accelerator_is_claimed_before_anything_is_built(
    second_rank: DistributedContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the time torch.distributed is initialised, and so before the trial is constructed."""
    seen: list[str] = []

    class Stop(Exception):
        pass

    def init_distributed() -> None:
        seen.append(device.get_accelerator().current_device_name())
        raise Stop

    monkeypatch.setattr(entrypoint, "_init_distributed", init_distributed)
    monkeypatch.setattr(entrypoint, "load_trial_class", lambda name: object)
    with pytest.raises(Stop):
        entrypoint.build_engine(
            RunInfo(trial="toy-0000beef", experiment={"entrypoint": "a:B"}), second_rank
        )
    assert seen == ["cuda:1"]
