"""Watch the memory of a run: a reading at a fixed point of some steps, into the rows of metrics.jsonl and the detector."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from holdfast.core.base import durable
from holdfast.core.base.clock import Clock
from holdfast.core.base.types import Finding
from holdfast.core.detectors.allocation_sites import summarize
from holdfast.core.detectors.memory import MemoryDetector, MemoryReading
from holdfast.core.detectors.out_of_memory import OutOfMemory, parse
from holdfast.core.record.rundir import to_json
from holdfast.runtime.record.memory_readings import device_limit, read_device, read_host, read_memory
from holdfast.runtime.tensors.torch_private import memory_snapshot

log = logging.getLogger("holdfast")

_READINGS_PER_INTERVAL, _MAX_INTERVAL = 16, 16
_MIN_HOST_SECONDS, _FIRST_HOST_READINGS, _FIRST_PAUSE, _PAUSE = 0.1, 64, 20, 200
"""the host is read at most so often. Then it is left alone for a multiple of the time that took, a smaller one at first"""
_MAX_ROWS = 4096


class MemoryWatch:
    """Reads the memory of one process. `every` is the distance in steps between two readings: 1 at first, then up to 16."""

    def __init__(
        self, devices: list[torch.device], clock: Clock, available: Callable[[], int], *, enabled: bool
    ) -> None:
        self._device = next((device for device in devices if device.type == "cuda"), None)
        self._clock, self._available = clock, available
        self.detector = MemoryDetector()
        self.every = 1 if enabled else 1 << 62
        self._readings = 0
        self.limit: int | None = None
        self._rows: dict[int, MemoryReading] = {}
        """readings that wait for their rows, by step"""
        self._host: dict[str, int] = {}
        self._next_host_time, self._host_readings = 0.0, 0

    @property
    def on_device(self) -> bool:
        """Return whether the run trains on a CUDA device."""
        return self._device is not None

    def read(self, step: int) -> list[Finding]:
        """Take a reading. Return what is found."""
        self._readings += 1
        if self._readings % _READINGS_PER_INTERVAL == 0:
            self.every = min(2 * self.every, _MAX_INTERVAL)
        host, self._host = self._host, {}
        if self._readings == 1:
            host = {"host_left": self._available()}
        reading = read_memory(step, self._device, self.read_limit(), host)
        if len(self._rows) >= _MAX_ROWS:
            self._rows.clear()
        self._rows[step] = reading
        return self.detector.observe(reading)

    def read_limit(self) -> int | None:
        """Return the bytes that the device allows; None without a device. The first allocation may fail before a reading."""
        if self.limit is None and self._device is not None:
            self.limit = device_limit(self._device)
        return self.limit

    def row(self, step: int) -> dict[str, float]:
        """Return the memory fields of a row. Called where rows are encoded, so the host is read beside the training."""
        reading = self._rows.pop(step, None)
        if reading is None:
            return {}
        if self._clock.monotonic() >= self._next_host_time:
            began = time.thread_time()
            self._host = read_host(self._available())
            self._host_readings += 1
            pause = (time.thread_time() - began) * (
                _FIRST_PAUSE if self._host_readings < _FIRST_HOST_READINGS else _PAUSE
            )
            self._next_host_time = self._clock.monotonic() + max(_MIN_HOST_SECONDS, pause)
        return reading.row()

    def mark_reported(self, kind: str) -> None:
        """Note that another rank has reported this kind: one report is enough."""
        self.detector.reported.add(kind)

    def explain(self, error: BaseException, step: int) -> Finding | None:
        """Return the verdict on an error of memory, of the device or the host; None for any other error."""
        failed = parse_error(error)
        if failed is None:
            return None
        if failed.where == "device" and failed.unallocated is None and self._device is not None:
            failed = from_counters(failed, read_device(self._device), self.read_limit())
        return self.detector.explain(failed, step)


def parse_error(error: BaseException) -> OutOfMemory | None:
    """Return what an error says about a failed allocation; None if it is about anything else."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        where = "device" if isinstance(error, torch.OutOfMemoryError) else "host"
        return parse(f"{type(error).__name__}: {error}") or OutOfMemory(where)
    return parse(str(error)) if isinstance(error, RuntimeError) else None


def from_counters(failed: OutOfMemory, counters: dict[str, int], limit: int | None) -> OutOfMemory:
    """Return a failed allocation with what its text does not say taken from the allocator's counters."""
    if not counters:
        return failed
    allocated, reserved = counters["allocated"], counters["reserved"]
    free = None if limit is None else float(max(0, limit - reserved))
    return failed._replace(
        free=free if failed.free is None else failed.free,
        allowed=failed.allowed if failed.limit is not None or limit is None else float(limit),
        allocated=float(allocated),
        unallocated=float(reserved - allocated),
    )


def save_snapshot(folder: Path, name: str, findings: list[dict[str, Any]] | None = None) -> dict[str, Any] | None:
    """Write torch's memory snapshot and a JSON summary of it. Return the summary; None if it cannot be taken or written.

    The pickle is for https://pytorch.org/memory_viz. Only the summary is ever read.
    """
    snapshot = memory_snapshot()
    if snapshot is None:
        return None
    summary = summarize(snapshot) | {"findings": findings or []}
    try:
        durable.make_folder(folder)
        durable.replace_file(folder / f"{name}.pickle", pickle.dumps(snapshot))
        durable.replace_file(folder / f"{name}.json", to_json(summary).encode())
    except OSError as error:  # it explains, and decides nothing
        log.warning("holdfast: the memory snapshot %s cannot be written: %s", folder / name, error.strerror)
        return None
    log.warning("holdfast: memory snapshot: %s.pickle, to be opened at https://pytorch.org/memory_viz", folder / name)
    return summary
