"""The throughput of training: samples, tokens and model FLOPs a second, and peaks of memory.

Only this module does the arithmetic; displays, reports, results and trackers show the results.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from trial_core.common import text_format

if TYPE_CHECKING:  # as `observers`
    from trial_core.schedule.work import NumberType, Work


@dataclass(frozen=True)
class Throughput:
    """The average over train-workloads. None: unknown.

    Attributes:
        mfu: model FLOPs utilisation: the model's operations a second, as a share of the devices'
            dense peak.
        peak_memory_bytes: the most memory that each rank has used since its start, in the order of
            ranks: of its accelerator's memory, allocated by torch; on the CPU, of its process.
    """

    batches_per_second: float | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    peak_memory_bytes: tuple[int, ...] = ()

    @property
    def peak_rank(self) -> int | None:
        peaks = self.peak_memory_bytes
        return peaks.index(max(peaks)) if any(peaks) else None

    def __str__(self) -> str:
        """``412 samples/s · 105k tokens/s · 38 % MFU · 61.2 GiB``, without unknown parts."""
        peaks = self.peak_memory_bytes
        memory = text_format.size(max(peaks)) if any(peaks) else ""
        return " · ".join(filter(None, (self.speed, memory)))

    @property
    def speed(self) -> str:
        """The text without the memory; in batches if the samples of a batch are unknown."""
        rates = [(self.samples_per_second, "samples/s"), (self.tokens_per_second, "tokens/s")]
        if self.samples_per_second is None:
            rates.insert(0, (self.batches_per_second, "batches/s"))
        parts = [text_format.rate(each, unit) for each, unit in rates if each is not None]
        if self.mfu is not None:
            parts.append(text_format.utilisation(self.mfu))
        return " · ".join(parts)

    @property
    def memory(self) -> str:
        """``61.2 GiB``, or ``61.2 GiB on rank 3`` of several; empty if unknown."""
        peaks = self.peak_memory_bytes
        if self.peak_rank is None:
            return ""
        where = f" on rank {self.peak_rank}" if len(peaks) > 1 else ""
        return f"{text_format.size(max(peaks))}{where}"

    def at(self, batches_per_second: float) -> Throughput:
        """This at another speed, with the same work per batch."""
        factor = batches_per_second / (self.batches_per_second or batches_per_second)
        return Throughput(
            batches_per_second,
            _times(self.samples_per_second, factor),
            _times(self.tokens_per_second, factor),
            _times(self.mfu, factor),
            self.peak_memory_bytes,
        )

    def to_json(self) -> dict[str, Any]:
        """For `--json` and results."""
        return {**asdict(self), "peak_memory_bytes": list(self.peak_memory_bytes)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any] | None) -> Throughput:
        """The throughput in a result, or None."""
        given = dict(fields or {})
        return cls(**{**given, "peak_memory_bytes": tuple(given.get("peak_memory_bytes", ()))})


@dataclass
class _Rate:
    amount: float = 0.0
    seconds: float = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """Count an amount, unless it is 0, which means unknown."""
        if amount > 0:
            self.amount += amount
            self.seconds += seconds

    @property
    def average(self) -> float | None:
        return self.amount / self.seconds if self.seconds > 0 else None


@dataclass
class ThroughputMeter:
    """Adds up train-workloads."""

    peak_flops: float | None = None  # the experiment's, of each device; None: the data sheets'
    _batches: _Rate = field(default_factory=_Rate)
    _samples: _Rate = field(default_factory=_Rate)
    _tokens: _Rate = field(default_factory=_Rate)
    # Out of the operations that the devices could have done.
    _utilisation: _Rate = field(default_factory=_Rate)
    _memory: tuple[int, ...] = ()

    def measured(
        self,
        batches: int,
        seconds: float,
        done: Work,  # in all its batches
        devices: Sequence[str],  # of the ranks, by name; empty for a rank on the CPU
        peak_memory_bytes: Sequence[int] = (),  # of each rank; empty if unknown
    ) -> tuple[Throughput, Throughput]:
        """Add a train-workload; return its throughput, and that of all."""
        peaks = [self.peak_flops or peak_flops(each, done.number_type) for each in devices]
        alone = ThroughputMeter()
        for meter in (alone, self):
            meter._batches.add(batches, seconds)
            meter._samples.add(done.samples, seconds)
            meter._tokens.add(done.tokens, seconds)
            if all(peaks):
                meter._utilisation.add(done.flops, seconds * sum(filter(None, peaks)))
            if any(peak_memory_bytes):
                meter.note_memory(peak_memory_bytes)
        return alone.throughput, self.throughput

    def note_memory(self, peak_memory_bytes: Sequence[int]) -> None:
        self._memory = tuple(peak_memory_bytes)

    @property
    def throughput(self) -> Throughput:
        return Throughput(
            self._batches.average,
            self._samples.average,
            self._tokens.average,
            self._utilisation.average,
            self._memory,
        )


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


class Peaks(NamedTuple):
    """The peaks of a device in TFLOP/s; None if it has no such arithmetic."""

    sixteen_bits: float  # of bf16 and fp16 alike
    tf32: float | None
    fp32: float


PEAKS: Mapping[str, Peaks] = {
    r"GB200": Peaks(2500, 1250, 80),
    r"B200": Peaks(2250, 1100, 75),
    r"GH200": Peaks(989.5, 494.5, 67),
    r"(H200|H100) NVL": Peaks(835.5, 417.5, 60),
    r"H100 PCIe": Peaks(756.5, 378, 51),
    r"H200|H100 80GB HBM3": Peaks(989.5, 494.5, 67),
    r"A100": Peaks(312, 156, 19.5),
    r"A40": Peaks(149.7, 74.8, 37.4),
    r"A30": Peaks(165, 82, 10.3),
    r"A10G": Peaks(70, 35, 31.5),
    r"A10": Peaks(125, 62.5, 31.2),
    r"L40S": Peaks(362, 183, 91.6),
    r"L40": Peaks(181, 90.5, 90.5),
    r"L4": Peaks(121, 60, 30.3),
    r"V100-PCIE": Peaks(112, None, 14),
    r"V100-SXM2": Peaks(125, None, 15.7),
    r"T4": Peaks(65, None, 8.1),
    r"MI300X|MI325X": Peaks(1307.4, 653.7, 163.4),
}
"""Dense operations, by a part of torch's name for the device. The first match counts.

NVIDIA's data sheets state the speed with structured sparsity, which training does not use; the
values here are half of that. Sources: NVIDIA's data sheets of the A10, A10G (of AWS), A30, A40,
A100, B200 and GB200 ("Blackwell architecture", values of one GPU), GH200, H100, H200, L4, L40,
L40S, T4 and V100, and AMD's of the MI300X and MI325X.
"""

_PART_OF_A_DEVICE = re.compile(r"\bMIG\b|\bGRID\b|-\d+[ABCQ]\b")  # a vGPU: A40-8Q


@functools.cache  # each workload asks for every rank
def peak_flops(device: str, number_type: NumberType) -> float | None:
    """The dense peak of a device, by torch's name for it, in operations a second; None: unknown.

    A part of a device (MIG, vGPU) has no known peak.
    """
    if _PART_OF_A_DEVICE.search(device):
        return None
    for name, peaks in PEAKS.items():
        if re.search(rf"(?<![A-Za-z0-9])(?:{name})(?![A-Za-z0-9])", device, re.IGNORECASE):
            by_type = {"tf32": peaks.tf32, "fp32": peaks.fp32}
            tera = by_type.get(number_type, peaks.sixteen_bits)
            return None if tera is None else tera * 1e12
    return None
