"""Probes of the state that the NVIDIA driver reports: memory errors, throttling, temperature, links, Xid messages.

NVML makes no device context. nvidia-ml-py is optional, and imported here only.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from holdfast.core.base.probe_result import ProbeResult, ProbeStatus
from holdfast.resilience.probes.probe import Answer, Probe, ProbeSettings, failed, make, not_checked, ok

_SLOWDOWNS = {0x8: "hardware slowdown", 0x20: "software thermal slowdown", 0x40: "hardware thermal slowdown",
              0x80: "power brake"}  # fmt: skip
_POWER_CAP = 0x4
_COOL_CELSIUS = 87
"""data-center GPUs slow down at about 90; used if the driver does not tell"""
_RESET, _REPLACE = "drain the host and reset the GPU: nvidia-smi --gpu-reset", "leave it out and have it replaced"
_XID = re.compile(r"^\[ *(\d+\.\d+)\].*NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d{1,4})\b", re.MULTILINE)
_HARDWARE_XIDS = {48, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140, 143, 154}
"""memory errors and remapped rows, NVLink, off the bus, no answer of the GSP, a reset is needed"""
_RECENT_SECONDS = 86400.0


class GpuReader:
    """Reads one GPU through NVML. A value that the driver does not have is None, and counts as not checked."""

    def __init__(self, nvml: Any, index: int) -> None:
        self.nvml, self.handle = nvml, nvml.nvmlDeviceGetHandleByIndex(index)

    def get(self, name: str, *arguments: Any) -> Any:
        """Return the result of `nvmlDeviceGet<name>`; None if this driver or device does not support it."""
        call: Callable[..., Any] | None = getattr(self.nvml, f"nvmlDeviceGet{name}", None)
        if call is None:
            return None
        try:
            value = call(self.handle, *arguments)
        except self.nvml.NVMLError:
            return None
        return value.decode(errors="replace") if isinstance(value, bytes) else value


def check_state(settings: ProbeSettings) -> Answer:
    """Report what the driver knows of every GPU."""
    name = "gpu state"
    try:
        import pynvml
    except ImportError:
        return not_checked(name, "nvidia-ml-py is not installed", "pip install nvidia-ml-py")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return not_checked(
            name, f"NVML does not start: {error}", "no NVIDIA GPU, or its driver is not loaded (nvidia-smi)"
        )
    try:
        count = pynvml.nvmlDeviceGetCount()
        results = [result for index in range(count) for result in _describe_gpu(pynvml, index)]
    finally:
        pynvml.nvmlShutdown()
    return results or not_checked(name, "the driver has no GPU for this process")


def _describe_gpu(nvml: Any, index: int) -> list[ProbeResult]:
    label = f"gpu {index}"
    try:
        gpu = GpuReader(nvml, index)
    except nvml.NVMLError as error:
        cure = "drain the host and reboot it: the GPU may have fallen off the bus"
        return [failed(f"{label} state", f"the driver cannot reach it: {error}", cure, device=f"gpu {index}")]
    device = gpu.get("UUID") or f"gpu {index}"
    results = [_memory_errors(gpu, label), _temperature(gpu, label), _link(gpu, label)]
    return [msgspec.structs.replace(result, device=device) for result in results]


def _memory_errors(gpu: GpuReader, label: str) -> ProbeResult:
    """Judge ECC errors and remapped rows."""
    name, uncorrected, volatile, aggregate = f"{label} memory errors", 1, 0, 1
    since_load = gpu.get("TotalEccErrors", uncorrected, volatile)
    ever = gpu.get("TotalEccErrors", uncorrected, aggregate)
    rows = gpu.get("RemappedRows")
    if since_load is None and rows is None:
        return not_checked(name, "the driver reports neither ECC errors nor remapped rows; is ECC off?")
    corrected, bad_rows, is_pending, has_failed = rows or (0, 0, 0, 0)
    numbers = {"uncorrected": (since_load or 0, "errors"), "uncorrected_ever": (ever or 0, "errors"),
               "remapped_rows": (corrected + bad_rows, "rows")}  # fmt: skip
    text = f"{since_load or 0} uncorrected ECC errors since the driver's start, {ever or 0} ever; {bad_rows} bad rows"
    if has_failed:
        return make(name, ProbeStatus.FAILED, f"{text}; a remapping failed", _REPLACE, numbers)
    if since_load:
        return make(name, ProbeStatus.FAILED, text, _RESET, numbers)
    if is_pending:
        return make(name, ProbeStatus.WARNING, f"{text}; a remapping waits for a reset", _RESET, numbers)
    return make(name, ProbeStatus.NOTE if ever or bad_rows else ProbeStatus.OK, text, numbers=numbers)


def _temperature(gpu: GpuReader, label: str) -> ProbeResult:
    """Judge temperature, power and the reasons for lower clocks."""
    name = f"{label} throttling"
    reasons = gpu.get("CurrentClocksEventReasons")
    reasons = gpu.get("CurrentClocksThrottleReasons") if reasons is None else reasons
    celsius, limit = gpu.get("Temperature", 0), gpu.get("TemperatureThreshold", 1) or _COOL_CELSIUS
    power, cap = gpu.get("PowerUsage") or 0, gpu.get("EnforcedPowerLimit") or 0
    if reasons is None or celsius is None:
        return not_checked(name, "the driver reports no temperature or no reasons for lower clocks")
    slowed = [text for bit, text in _SLOWDOWNS.items() if reasons & bit]
    numbers = {"temperature": (celsius, "C"), "slowdown_at": (limit, "C"), "power": (power / 1e3, "W"),
               "power_limit": (cap / 1e3, "W")}  # fmt: skip
    text = f"{celsius} C (slows down at {limit}), {power / 1e3:.0f} of {cap / 1e3:.0f} W"
    if slowed or celsius >= limit:
        cure = "check cooling and power supply: this rank slows down all others"
        return make(name, ProbeStatus.WARNING, f"{text}: {', '.join(slowed) or 'too hot'}", cure, numbers)
    if reasons & _POWER_CAP:
        return make(name, ProbeStatus.NOTE, f"{text}: at its power limit, as under full load", numbers=numbers)
    return ok(name, text, numbers)


def _link(gpu: GpuReader, label: str) -> ProbeResult:
    """Judge the PCIe link. An idle link lowers its generation to save power, but keeps its width."""
    name = f"{label} link"
    width, full_width = gpu.get("CurrPcieLinkWidth"), gpu.get("MaxPcieLinkWidth")
    generation, full = gpu.get("CurrPcieLinkGeneration"), gpu.get("MaxPcieLinkGeneration")
    if not width or not full_width:
        return not_checked(name, "the driver reports no PCIe link")
    text = f"PCIe generation {generation} of {full}, {width} of {full_width} lanes"
    numbers = {"lanes": (width, ""), "max_lanes": (full_width, "")}
    if width < full_width:
        return make(
            name, ProbeStatus.WARNING, text, "reseat the GPU or its riser: copies to the host are slow", numbers
        )
    return ok(name, text, numbers)


class Xid(NamedTuple):
    """One error message of the NVIDIA driver."""

    age_seconds: float
    pci: str
    number: int


def find_xids(kernel_log: str, now: float) -> list[Xid]:
    """Return the Xid messages of a kernel log; `now` is the time since the boot."""
    return [Xid(now - float(at), pci, int(number)) for at, pci, number in _XID.findall(kernel_log)]


def judge_xids(xids: list[Xid]) -> ProbeResult:
    """Judge the messages. They are history: whether a GPU works now, its state and its answers tell."""
    recent = [x for x in xids if x.age_seconds < _RECENT_SECONDS]
    listed = ", ".join(f"Xid {x.number} on {x.pci} {x.age_seconds / 3600:.1f} h ago" for x in (recent or xids)[-8:])
    if any(x.number in _HARDWARE_XIDS for x in recent):
        return make("xid", ProbeStatus.WARNING, listed, "reset the GPU, unless that was done since")
    if xids:
        return make("xid", ProbeStatus.NOTE, f"{listed}: most such messages are faults of a program, or old")
    return ok("xid", "no Xid message in the kernel's log")


def check_xids(settings: ProbeSettings) -> ProbeResult:
    """Read the kernel's log for errors of the NVIDIA driver."""
    try:
        done = subprocess.run(["dmesg"], stdin=subprocess.DEVNULL, capture_output=True, timeout=10)
    except (OSError, subprocess.SubprocessError) as error:
        return not_checked("xid", f"dmesg cannot be run: {error}")
    if done.returncode != 0:
        return not_checked("xid", "the kernel's log cannot be read", "run as root, as a prolog does")
    xids = find_xids(done.stdout.decode(errors="replace"), time.clock_gettime(time.CLOCK_MONOTONIC))
    if not xids and not os.path.exists("/proc/driver/nvidia"):
        return not_checked("xid", "no NVIDIA driver is loaded")
    return judge_xids(xids)


PROBES = (Probe("gpu state", 60.0, check_state), Probe("xid", 15.0, check_xids))
