"""The peak speed of accelerators: dense operations a second, from their vendors' data sheets.

NVIDIA's data sheets state the speed with structured sparsity, which training does not use; the
values here are half of that. Sources: NVIDIA's data sheets of the A10, A10G (of AWS), A30, A40,
A100, B200 and GB200 ("Blackwell architecture", values of one GPU), GH200, H100, H200, L4, L40,
L40S, T4 and V100, and AMD's of the MI300X and MI325X.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # as `observers`
    from trial_core.schedule.work import NumberType


class Peaks(NamedTuple):
    """The peaks of a device in TFLOP/s; None if it has no such arithmetic.

    Attributes:
        sixteen_bits: of bf16 and fp16 alike.
    """

    sixteen_bits: float
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
"""By a part of torch's name for the device. The first match counts."""

_PART_OF_A_DEVICE = re.compile(r"\bMIG\b|\bGRID\b|-\d+[ABCQ]\b")  # a vGPU: A40-8Q


@functools.cache  # each workload asks for every rank
def peak_flops(device: str, number_type: NumberType) -> float | None:
    """The dense peak of a device, in operations a second; None if not known.

    A part of a device (MIG, vGPU) has no known peak.

    Args:
        device: torch's name for it: ``NVIDIA H100 80GB HBM3``.
    """
    if _PART_OF_A_DEVICE.search(device):
        return None
    for name, peaks in PEAKS.items():
        if re.search(rf"(?<![A-Za-z0-9])(?:{name})(?![A-Za-z0-9])", device, re.IGNORECASE):
            by_type = {"tf32": peaks.tf32, "fp32": peaks.fp32}
            tera = by_type.get(number_type, peaks.sixteen_bits)
            return None if tera is None else tera * 1e12
    return None
