"""A memory monitor for any training loop, by the name and signature of KempnerForge: call `report` after each step."""

from __future__ import annotations

import logging
import weakref
from pathlib import Path
from typing import Any

import msgspec
import torch

from holdfast.core.base.clock import SystemClock
from holdfast.core.base.types import Finding, Kind
from holdfast.core.detectors.allocation_sites import Site, growing, summarize
from holdfast.core.detectors.out_of_memory import OutOfMemory, format_bytes
from holdfast.resilience.growing_containers import count_items, find_growing
from holdfast.runtime.record.memory_readings import read_device
from holdfast.runtime.record.memory_watch import MemoryWatch, from_counters, save_snapshot
from holdfast.runtime.snapshots.memory import available_bytes
from holdfast.runtime.tensors import torch_private

log = logging.getLogger("holdfast")

_GB = 1024**3
_HISTORY_ENTRIES = 100_000
_BASELINE_REPORT = 10
"""the report at which allocations and containers are counted, to be compared when memory is found to grow"""
_MAX_SNAPSHOTS = 4
_GROWS_IN_PYTHON = (Kind.MEMORY_LEAK, Kind.HOST_GROWTH)


class DeviceMemoryMonitor:
    """Reports the memory of a device and the host after each step, and finds leaks, fragmentation and growth on the host.

    On a CUDA device it records the stacks of allocations from the beginning, so that snapshots carry them. It takes a
    snapshot at `snapshot_step`, when memory is found to leak or to fragment, and when an allocation fails: a pickle for
    https://pytorch.org/memory_viz, and beside it a JSON summary. Without CUDA it watches the host.

    findings: what was found so far. record_history=False: snapshots without stacks, which cost nothing per allocation.
    """

    def __init__(
        self,
        device: int | str | torch.device = 0,
        snapshot_step: int | None = None,
        snapshot_dir: str = "memory_snapshots",
        *,
        record_history: bool = True,
    ) -> None:
        if not torch.cuda.is_available() and isinstance(device, int):
            device = "cpu"
        self.device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        self.snapshot_step, self.snapshot_dir = snapshot_step, snapshot_dir
        self.findings: list[Finding] = []
        self._watch = MemoryWatch([self.device], SystemClock(), available_bytes, enabled=True)
        self._step = self._reports = self._snapshots = self._baseline_step = 0
        self._sites: dict[str, Any] | None = None
        self._items: dict[int, tuple[str, int]] = {}
        self._failed: OutOfMemory | None = None
        """the failed allocation that torch has told of before it raised"""
        self._has_history = False
        if self.device.type == "cuda":
            self._has_history = record_history and torch_private.record_memory_history(_HISTORY_ENTRIES)
            reference = weakref.ref(self)
            torch_private.call_when_out_of_memory(lambda *sizes: _pass_on(reference, sizes))

    def report(self, step: int) -> dict[str, float]:
        """Return the memory in GB: allocated, peak since the last report, reserved, total. Logs and resets the peak.

        Call it at the same point of every step. What is found is logged, and added to `findings`.
        """
        self._step, self._failed = step, None
        found = self._watch.read(step)
        row = self._watch.row(step)
        stats = self._device_stats(row)
        log.info(
            "holdfast: step %d: GPU memory: %.2f GB allocated, %.2f GB peak, %.2f GB reserved of %.2f GB (%.0f%%)",
            *(step, stats["allocated_gb"], stats["peak_gb"], stats["reserved_gb"], stats["total_gb"]),
            100 * stats["mem_utilization"],
        )
        for name in ("host", "workers", "shm", "page_cache"):
            if (value := row.get(f"memory_{name}")) is not None:
                stats[f"{name}_gb"] = value * 1e9 / _GB
        self._reports += 1
        if self._reports == _BASELINE_REPORT:
            self._take_baseline(step)
        for finding in found:
            self._add(finding)
        if step == self.snapshot_step:
            self.capture_snapshot(step)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        return stats

    def _device_stats(self, row: dict[str, float]) -> dict[str, float]:
        names = {"allocated_gb": "memory_allocated", "peak_gb": "memory_peak", "reserved_gb": "memory_reserved"}
        stats = {name: row.get(field, 0.0) * 1e9 / _GB for name, field in names.items()}
        is_cuda = self.device.type == "cuda"
        stats["total_gb"] = torch.cuda.get_device_properties(self.device).total_memory / _GB if is_cuda else 0.0
        stats["mem_utilization"] = stats["peak_gb"] / stats["total_gb"] if stats["total_gb"] else 0.0
        return stats

    def _take_baseline(self, step: int) -> None:
        self._baseline_step, self._items = step, count_items()
        if self._has_history and (snapshot := torch_private.memory_snapshot()) is not None:
            self._sites = summarize(snapshot)

    def capture_snapshot(self, step: int) -> str | None:
        """Write a snapshot of the CUDA allocator and its summary. Return the path of the pickle; None if it failed."""
        name = f"snapshot_step_{step}_device_{self.device.index or 0}"
        findings = [msgspec.to_builtins(finding) for finding in self.findings]
        if self.device.type != "cuda" or save_snapshot(Path(self.snapshot_dir), name, findings) is None:
            return None
        return str(Path(self.snapshot_dir) / f"{name}.pickle")

    def growing_sites(self, most: int = 5) -> list[Site]:
        """Return the lines of code whose allocations have grown since the tenth report, if history is recorded."""
        snapshot = None if self._sites is None else torch_private.memory_snapshot()
        return [] if snapshot is None or self._sites is None else growing(self._sites, summarize(snapshot), most)

    def explain(self, error: BaseException) -> Finding | None:
        """Return the verdict on an error of memory; None for any other error. Call it in `except`."""
        if self._failed is not None and isinstance(error, torch.OutOfMemoryError):
            return self.findings[-1]
        finding = self._watch.explain(error, self._step)
        if finding is not None:
            self._add(finding)
        return finding

    def close(self) -> None:
        """Stop recording the stacks of allocations."""
        if self._has_history:
            self._has_history = torch_private.record_memory_history(None)

    def _add(self, finding: Finding) -> None:
        """Log a finding with what grows, and take a snapshot."""
        sites = [f"{site.place}: +{format_bytes(site.grown)}" for site in self.growing_sites()]
        containers: list[str] = []
        if finding.kind in _GROWS_IN_PYTHON and self._items:
            containers = list(map(str, find_growing(self._items, self._step - self._baseline_step)))
        evidence = {**finding.evidence, "growing_sites": sites, "growing_containers": containers}
        finding = msgspec.structs.replace(finding, evidence=evidence)
        self.findings.append(finding)
        log.warning("holdfast: step %d: %s: %s", finding.step, finding.kind, finding.message)
        for line in (*sites, *containers):
            log.warning("holdfast: step %d: it grows here: %s", finding.step, line)
        if self._snapshots < _MAX_SNAPSHOTS:
            self._snapshots += 1
            self.capture_snapshot(finding.step)

    def _on_out_of_memory(self, device: int, asked: int, free: int) -> None:
        """Take the verdict and the snapshot at the moment of the failure, before the error frees what was in use."""
        if device != (self.device.index or 0):
            return
        counters = read_device(self.device)
        failed = OutOfMemory("device", asked=float(asked), free=float(free))
        self._failed = from_counters(failed, counters, self._watch.read_limit())
        self._add(self._watch.detector.explain(self._failed, self._step))


def _pass_on(reference: weakref.ref[DeviceMemoryMonitor], sizes: tuple[int, ...]) -> None:
    """Pass a failed allocation on to a monitor that still exists. An error here would hide torch's own."""
    monitor = reference()
    if monitor is None:
        return
    try:
        device, asked, _, free = sizes
        monitor._on_out_of_memory(device, asked, free)
    except Exception as error:  # it explains, and decides nothing
        log.warning("holdfast: a failed allocation was not explained: %s: %s", type(error).__name__, error)
