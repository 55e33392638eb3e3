"""Metrics of this machine: processor, memory, network, accelerators."""

from __future__ import annotations

import time
from contextlib import suppress

import psutil

from trial_core.observe.trackers.records import Metrics

PERIOD_SECONDS = 30.0


class SystemMetrics:
    """Measures the driver's machine now and then, but no other node."""

    def __init__(self) -> None:
        self._due_at = 0.0
        psutil.cpu_percent()  # the next call measures the time since this one

    def seconds_left(self) -> float:
        """Seconds until the next measurement; 0: now."""
        return max(0.0, self._due_at - time.monotonic())

    def measure(self, batches: int, samples: int, attempt: int) -> Metrics:
        """The present values, as metrics at the last batch reached."""
        self._due_at = time.monotonic() + PERIOD_SECONDS
        network = psutil.net_io_counters()
        values: dict[str, float | None] = {
            "system/cpu_percent": psutil.cpu_percent(),
            "system/memory_percent": psutil.virtual_memory().percent,
            "system/network_sent_bytes": float(network.bytes_sent),
            "system/network_received_bytes": float(network.bytes_recv),
            **accelerators(),
        }
        return Metrics(
            at=time.time(), batches=batches, samples=samples, attempt=attempt, values=values
        )


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
