"""The use of this machine: processor, memory, network, accelerators."""

from __future__ import annotations

import time
from contextlib import suppress

import psutil

SHORTEST_SECONDS = 1.0
"""Of a shorter time, the processor's use is noise."""


class SystemUse:
    """Measures this machine, with everything that runs on it, now and then."""

    def __init__(self, period_seconds: float) -> None:
        self._period_seconds = period_seconds
        self._processor = _busy_and_total()
        self._began = time.monotonic()
        self._due_at = self._began + SHORTEST_SECONDS

    def seconds_left(self) -> float:
        """Seconds until the next measurement; 0: now."""
        return max(0.0, self._due_at - time.monotonic())

    def has_something(self) -> bool:
        """Return whether enough time has passed for another measurement, due or not."""
        return time.monotonic() - self._began >= SHORTEST_SECONDS

    def measure(self) -> dict[str, float | None]:
        """The present values, by the names that trackers show; the processor's since the last.

        Empty if the machine does not tell them.
        """
        with suppress(OSError, psutil.Error):
            return self._measured()
        return {}

    def _measured(self) -> dict[str, float | None]:
        self._began = time.monotonic()
        self._due_at = self._began + self._period_seconds
        (busy, total), (busy_before, total_before) = _busy_and_total(), self._processor
        self._processor = busy, total
        passed = total - total_before
        network = psutil.net_io_counters()  # None without an interface
        sent = (
            {}
            if network is None
            else {
                "system/network_sent_bytes": float(network.bytes_sent),
                "system/network_received_bytes": float(network.bytes_recv),
            }
        )
        return {
            "system/cpu_percent": 100 * (busy - busy_before) / passed if passed > 0 else None,
            "system/memory_percent": psutil.virtual_memory().percent,
            **sent,
            **accelerators(),
        }


def _busy_and_total() -> tuple[float, float]:
    """Seconds of all processors since the machine's start.

    For a difference: `psutil.cpu_percent` remembers a call for the calling thread alone.
    """
    try:
        times = psutil.cpu_times()
    except (OSError, psutil.Error):
        return 0.0, 0.0
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # in user, in nice
    total = sum(times) - guests
    return total - times.idle - getattr(times, "iowait", 0.0), total


def accelerators() -> dict[str, float | None]:
    """NVIDIA devices' use and memory in percent; empty without the package nvidia-ml-py."""
    values: dict[str, float | None] = {}
    try:
        import pynvml
    except ImportError:
        return values
    with suppress(pynvml.NVMLError):  # no driver, or a device without such numbers
        pynvml.nvmlInit()
        try:
            for index in range(pynvml.nvmlDeviceGetCount()):
                device = pynvml.nvmlDeviceGetHandleByIndex(index)
                memory = pynvml.nvmlDeviceGetMemoryInfo(device)
                use = pynvml.nvmlDeviceGetUtilizationRates(device).gpu
                values[f"system/gpu{index}_percent"] = float(use)
                values[f"system/gpu{index}_memory_percent"] = 100 * memory.used / memory.total
        finally:
            pynvml.nvmlShutdown()
    return values
