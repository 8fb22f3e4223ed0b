"""Probes that compute on a GPU: products with known answers, memory patterns, and figures beside the data sheet."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from holdfast.core.base.probe_result import ProbeResult, ProbeStatus
from holdfast.resilience.probes.host import known_product
from holdfast.resilience.probes.probe import Answer, Probe, ProbeSettings, failed, make, not_checked, ok

ACCESS, COMPUTE, MEMORY = "gpu access", "gpu compute", "gpu memory"
_REPLACE = "leave it out and have it tested: it computes or stores wrongly"
_SIZES = {"least": (64, 1 << 20, 1), "quick": (4096, 256 << 20, 5), "full": (8192, 4 << 30, 20)}
"""effort: rows of a matrix, bytes of memory, repetitions"""
DEVICE_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""of NVIDIA's driver, of Windows' subsystem for Linux, and of AMD's driver"""
_LOW_SHARE = 0.6
"""of the data sheet; healthy devices reach 0.7 to 0.95"""


class DataSheet(NamedTuple):
    """What the maker states: dense bf16 in TFLOP/s and memory in GB/s."""

    tflops: float
    gb_per_second: float


_DATA_SHEETS = {
    "B200": DataSheet(2250, 8000), "H200": DataSheet(989, 4800), "H100 80GB HBM3": DataSheet(989, 3350),
    "H100 PCIe": DataSheet(756, 2000), "H100 NVL": DataSheet(835, 3900), "A100-SXM4-80GB": DataSheet(312, 2039),
    "A100-SXM4-40GB": DataSheet(312, 1555), "A100 80GB PCIe": DataSheet(312, 1935), "L40S": DataSheet(362, 864),
}  # fmt: skip


def find_data_sheet(name: str) -> DataSheet | None:
    """Return the figures of a device by its CUDA name; None if it is not a known one."""
    return next((sheet for part, sheet in _DATA_SHEETS.items() if part in name), None)


def for_each_gpu(
    name: str, check: Callable[[Any, int, ProbeSettings], ProbeResult]
) -> Callable[[ProbeSettings], Answer]:
    """Return a probe that runs a check on one GPU or on each. A GPU that raises has failed, unless its memory is in use."""

    def run(settings: ProbeSettings) -> Answer:
        if not any(map(os.path.exists, DEVICE_FILES)):  # known without the seconds that importing torch takes
            return not_checked(name, "this host has no GPU: none of its device files exists")
        try:
            import torch
        except ImportError as error:
            return not_checked(name, f"torch cannot be imported: {error}", "pip install 'holdfast[torch]'")
        if not torch.cuda.is_available():
            text = "the driver has device files, but torch finds no GPU"
            cure = "see nvidia-smi: no GPU was asked for, torch has no CUDA, or the driver does not start"
            return make(name, ProbeStatus.WARNING, text, cure) if name == ACCESS else not_checked(name, text)
        devices = range(torch.cuda.device_count()) if settings.device is None else [settings.device]
        return [_run_on(torch, name, check, index, settings) for index in devices]

    return run


def _run_on(
    torch: Any, name: str, check: Callable[[Any, int, ProbeSettings], ProbeResult], index: int, settings: ProbeSettings
) -> ProbeResult:
    label, device = name.replace("gpu", f"gpu {index}", 1), f"gpu {index}"
    try:
        from holdfast.runtime.tensors.device_identity import device_name

        with torch.cuda.device(index):
            torch.zeros(1, device="cuda")  # opens the device, which has a name only then
            device = device_name(index)
            result = check(torch, index, settings)
    except torch.OutOfMemoryError as error:
        return not_checked(label, f"its memory is in use: {str(error)[:120]}", "end the processes on it (nvidia-smi)")
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        return failed(label, reason, "see the kernel's log; reset the GPU", device=device)
    finally:
        if settings.effort != "least":
            torch.cuda.empty_cache()
    return msgspec.structs.replace(result, name=label, device=device)


def check_access(torch: Any, index: int, settings: ProbeSettings) -> ProbeResult:
    """Open the device and add some numbers."""
    ones = torch.ones(16, device="cuda")
    if (total := float((ones + ones).sum())) != 32.0:
        return failed("", f"the sum of 16 twos is {total}", _REPLACE)
    free, size = torch.cuda.mem_get_info(index)
    text = f"{torch.cuda.get_device_name(index)}, {free / 1e9:,.1f} of {size / 1e9:,.1f} GB free"
    if free < size / 2:
        return make("", ProbeStatus.NOTE, text, "another process uses it (nvidia-smi)", {"free": (free / 1e9, "GB")})
    return ok("", text, {"free": (free / 1e9, "GB")})


def check_answers(torch: Any, index: int, settings: ProbeSettings) -> ProbeResult:
    """Multiply matrices of a known product in three dtypes, and one of random numbers again and again."""
    size, _, times = _SIZES[settings.effort]
    exact = [torch.from_numpy(matrix) for matrix in known_product(min(size, 1024))]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        left, right, product = (matrix.to("cuda", dtype) for matrix in exact)
        wrong = int((left @ right != product).sum())
        if wrong:
            return failed("", f"{wrong:,} wrong values in a product of known answer, {dtype}", _REPLACE)
    random = torch.randn(size, size, generator=torch.Generator().manual_seed(0)).to("cuda", torch.bfloat16)
    first = random @ random
    for _ in range(times):
        if not torch.equal(random @ random, first):
            return failed("", "the same product gives different bits when it is computed again", _REPLACE)
    seconds = _fastest(torch, lambda: random @ random, times)
    tflops = 2 * size**3 / seconds / 1e12
    name, sheet = torch.cuda.get_device_name(index), find_data_sheet(torch.cuda.get_device_name(index))
    text = f"{name}: known products in bf16, fp16 and fp32; {tflops:,.0f} TFLOP/s in bf16"
    return _beside("", text, tflops, "TFLOP/s", sheet and sheet.tflops, settings)


def check_gpu_memory(torch: Any, index: int, settings: ProbeSettings) -> ProbeResult:
    """Write patterns to a bounded part of the device memory, read them back, and measure the speed of a copy."""
    _, wanted, times = _SIZES[settings.effort]
    size = min(wanted, int(torch.cuda.mem_get_info(index)[0]) // 4)
    block = torch.empty(size // 8, dtype=torch.int64, device="cuda")
    for pattern in (0, -1, 0x5555_5555_5555_5555, -0x5555_5555_5555_5556):
        block.fill_(pattern)
        if int((block != pattern).sum()):
            return failed("", f"{size >> 20} MB came back with other values", _REPLACE)
    torch.arange(len(block), out=block)
    copy = torch.empty_like(block)
    seconds = _fastest(torch, lambda: copy.copy_(block), times)
    if not torch.equal(copy, torch.arange(len(block), device="cuda")):
        return failed("", f"a copy of {size >> 20} MB has other values", _REPLACE)
    speed = 2 * block.nbytes / seconds / 1e9
    sheet = find_data_sheet(torch.cuda.get_device_name(index))
    text = f"{size >> 20} MB keep their patterns; a copy within the device {speed:,.0f} GB/s, reads and writes counted"
    return _beside("", text, speed, "GB/s", sheet and sheet.gb_per_second, settings)


def check_transfer(torch: Any, index: int, settings: ProbeSettings) -> ProbeResult:
    """Copy to the device and back through pinned memory, compare, and measure both ways."""
    _, wanted, times = _SIZES[settings.effort]
    there = torch.arange(min(wanted, 256 << 20) // 8, pin_memory=True)
    back, block = torch.empty_like(there, pin_memory=True), torch.empty_like(there, device="cuda")
    to_device = there.nbytes / _fastest(torch, lambda: block.copy_(there, non_blocking=True), times) / 1e9
    to_host = there.nbytes / _fastest(torch, lambda: back.copy_(block, non_blocking=True), times) / 1e9
    if not torch.equal(back, there):
        return failed("", f"{there.nbytes >> 20} MB came back with other values over the link", _REPLACE)
    text = f"{to_device:.1f} GB/s to the device, {to_host:.1f} GB/s back, pinned"
    return ok("", text, {"to_device": (to_device, "GB/s"), "to_host": (to_host, "GB/s")})


def _fastest(torch: Any, work: Callable[[], Any], times: int) -> float:
    """Return the seconds of the fastest of some repetitions, after one to warm up."""
    best = float("inf")
    for _ in range(times + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best


def _beside(
    name: str, text: str, value: float, unit: str, stated: float | None, settings: ProbeSettings
) -> ProbeResult:
    """Return a figure beside that of the data sheet. Short runs are not judged by it: the clocks have not risen yet."""
    numbers = {"measured": (value, unit)}
    if stated is None:
        return ok(name, f"{text}; no data sheet on record for this device", numbers)
    numbers |= {"data_sheet": (stated, unit), "share": (100 * value / stated, "%")}
    text = f"{text}, {value / stated:.0%} of the data sheet ({stated:,.0f})"
    if settings.effort == "full" and value < _LOW_SHARE * stated:
        cure = "see throttling and who else uses it (nvidia-smi); this rank slows down all others"
        return make(name, ProbeStatus.WARNING, text, cure, numbers)
    return ok(name, text, numbers)


PROBES = (
    Probe(ACCESS, 60.0, for_each_gpu(ACCESS, check_access)),
    Probe(COMPUTE, 180.0, for_each_gpu(COMPUTE, check_answers)),
    Probe(MEMORY, 120.0, for_each_gpu(MEMORY, check_gpu_memory)),
    Probe("gpu transfer", 120.0, for_each_gpu("gpu transfer", check_transfer)),
)
