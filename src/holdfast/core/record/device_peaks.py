"""The peak FLOP/s of devices by dtype, from their data sheets: dense, without sparsity, with sums in float32."""

from __future__ import annotations

from typing import NamedTuple


class DevicePeak(NamedTuple):
    """One device: words of its name, all of which must appear, and its TFLOP/s."""

    words: tuple[str, ...]
    half: float
    """bfloat16 and float16"""
    tf32: float
    fp32: float
    fp8: float = 0.0
    is_half_fp16: bool = False
    """the device has no bfloat16"""


# The first row whose words are all in the name counts: variants stand before the plain name.
_UNKNOWN = (0.0, 0.0, 0.0)
"""for a variant whose data sheet was not at hand: no figure rather than that of its sibling"""
_H100_SXM, _H100_PCIE = (989.4, 494.7, 66.9, 1978.9), (756.0, 378.0, 51.0, 1513.0)
_MI300X = (1307.4, 653.7, 163.4, 2614.9)
_OTHER_DEVICE = {"TI", "SUPER", "LAPTOP", "MOBILE", "MAX", "D", "MIG", "GRID"}
"""words that make it another device than the rest of its name says, or a part of it: no figure rather than a wrong one"""
_PEAKS = (
    DevicePeak(("GB200",), 2500.0, 1250.0, 80.0, 5000.0),
    DevicePeak(("GH200",), *_H100_SXM),
    DevicePeak(("B200",), 2250.0, 1100.0, 75.0, 4500.0),
    DevicePeak(("H200", "NVL"), 835.5, 417.5, 60.0, 1670.5),
    DevicePeak(("H200",), *_H100_SXM),
    DevicePeak(("H100", "NVL"), 835.0, 417.0, 60.0, 1670.0),
    DevicePeak(("H100", "PCIE"), *_H100_PCIE),
    DevicePeak(("H100",), *_H100_SXM),
    DevicePeak(("H800", "PCIE"), *_UNKNOWN),
    DevicePeak(("H800",), *_H100_SXM),
    DevicePeak(("H20",), 148.0, 0.0, 0.0, 296.0),
    DevicePeak(("A100",), 312.0, 156.0, 19.5),  # PCIe and SXM alike
    DevicePeak(("A800",), 312.0, 156.0, 19.5),
    DevicePeak(("A30",), 165.0, 82.0, 10.3),
    DevicePeak(("A40",), 149.7, 74.8, 37.4),
    DevicePeak(("A10",), 125.0, 62.5, 31.2),
    DevicePeak(("L40S",), 362.0, 183.0, 91.6, 733.0),
    DevicePeak(("L40",), 181.0, 90.5, 90.5, 362.0),
    DevicePeak(("L4",), 121.0, 60.0, 30.3, 242.0),
    DevicePeak(("RTX", "A6000"), 154.8, 77.4, 38.7),
    DevicePeak(("RTX", "4090"), 165.2, 82.6, 82.6, 330.3),
    DevicePeak(("RTX", "3090"), 71.0, 35.6, 35.6),
    DevicePeak(("V100", "PCIE"), 112.0, 0.0, 14.0, 0.0, True),
    DevicePeak(("V100",), 125.0, 0.0, 15.7, 0.0, True),
    DevicePeak(("T4",), 65.0, 0.0, 8.1, 0.0, True),
    DevicePeak(("MI325X",), *_MI300X),
    DevicePeak(("MI300X",), *_MI300X),
    DevicePeak(("MI250X",), 191.5, 0.0, 47.9),  # torch sees each of its two halves
    DevicePeak(("MI250",), 181.0, 0.0, 45.3),
)
_SXM_WATTS = 500
"""an H100 or H800 whose name does not say how it is connected is on SXM above this power limit"""


def find_peak(name: str, dtype: str, watts: float | None = None) -> float | None:
    """Return the peak FLOP/s of a device, or None if the device, or the dtype on it, is not in the table.

    name: as torch.cuda.get_device_name returns it. dtype: bf16, fp16, tf32, fp32 or fp8. watts: its power limit, which tells
    a PCIe card from an SXM module if the name does not.
    """
    words = name.upper().replace("-", " ").replace("_", " ").split()
    says_variant = any(word in ("PCIE", "NVL", "SXM", "HBM3", "SXM4", "SXM5") for word in words)
    if not says_variant and watts is not None and watts <= _SXM_WATTS and {"H100", "H800"} & set(words):
        words.append("PCIE")
    if _OTHER_DEVICE & set(words):
        return None
    for peak in _PEAKS:
        if set(peak.words) <= set(words):
            if dtype == "bf16" and peak.is_half_fp16:
                return None
            value = {"bf16": peak.half, "fp16": peak.half, "tf32": peak.tf32, "fp32": peak.fp32, "fp8": peak.fp8}.get(
                dtype
            )
            return value * 1e12 if value else None
    return None
