"""The use of this machine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from trial_core.processes.machine.system_use import SystemUse


def test_any_thread_measures_the_processor_since_the_last_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Waiting for a disk is no use of it, and a guest's time is counted once."""
    now, passed = psutil.cpu_times(), 0.0

    def times() -> object:
        more = {"user": 30, "idle": 8, "iowait": 2, "guest": 10}
        return now._replace(**{k: getattr(now, k) + passed * v for k, v in more.items()})

    monkeypatch.setattr(psutil, "cpu_times", times)
    use = SystemUse(5.0)
    passed = 1.0
    with ThreadPoolExecutor(1) as other:
        measured = other.submit(use.measure).result()
    assert measured["system/cpu_percent"] == pytest.approx(75.0)
    assert 0 < (measured["system/memory_percent"] or 0) <= 100
