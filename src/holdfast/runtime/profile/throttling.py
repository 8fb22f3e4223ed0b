"""Ask the driver whether a GPU runs below its clocks."""

from __future__ import annotations

import torch

_REASONS = {
    0x08: "hardware slowdown",
    0x20: "thermal slowdown by software",
    0x40: "thermal slowdown by hardware",
    0x80: "power brake",
}
"""bits of NVML's clocks event reasons that no healthy GPU has; the power cap is not among them"""


def throttle_reasons(devices: list[torch.device]) -> str:
    """Return why any of the devices is throttled, in words; empty if none is, or the driver cannot tell."""
    found = []
    try:
        import pynvml

        for device in devices:
            if device.type == "cuda":
                pynvml.nvmlInit()
                handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
                reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
                found += [text for bit, text in _REASONS.items() if reasons & bit]
    except Exception:  # no NVML, or an older driver
        return ""
    return ", ".join(found)
