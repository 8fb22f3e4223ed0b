"""Copies the last part of a snapshot within the device first, if the bus is too slow for the time between two updates.

An update must not overwrite tensors that are still being read. If several updates in a row waited for copies, the late
part is first copied within the device, at the speed of its memory. It crosses to the host from there while the update
runs. The staging memory is at most an eighth of the free device memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from holdfast.runtime.snapshots.layout import SnapshotLayout
from holdfast.runtime.snapshots.memory import free_device_bytes

TOLERATED_MS = 0.3
"""an update may wait this many milliseconds for a copy"""
LATE_COPIES = 3
"""late copies in a row before anything is staged"""
MARGIN = 1.25


class CopyTiming:
    """Events of one copy: it could begin, its reads began and ended, and the next update was ready to run."""

    def __init__(self, nbytes: int) -> None:
        self.ready, self.read_begun, self.read_ended, self.update_ready = (_event() for _ in range(4))
        self._nbytes = nbytes
        self._update_seen = False

    def record_update(self, stream: torch.cuda.Stream) -> None:
        """Record that the update is next on that stream. Only the first call counts."""
        if not self._update_seen:
            self.update_ready.record(stream)
            self._update_seen = True

    def late_bytes(self) -> float | None:
        """Return the bytes still unread when the update was ready, 0 if it did not wait; None if not known yet."""
        if not (self._update_seen and _has_passed(self.read_ended) and _has_passed(self.update_ready)):
            return None
        read_ms = self.read_begun.elapsed_time(self.read_ended)
        late_ms = self.ready.elapsed_time(self.read_ended) - self.ready.elapsed_time(self.update_ready)
        return self._nbytes * late_ms / read_ms if late_ms > TOLERATED_MS and read_ms > 0 else 0.0


class DeviceStaging:
    """Stages copies of one layout from one device. `note` tells the user about it, or is None."""

    def __init__(self, layout: SnapshotLayout, device: torch.device) -> None:
        self.layout, self._device = layout, device
        self._crossing = [i for i in layout.large if layout.device(i) == device]
        self._total = sum(map(layout.size, self._crossing))
        self.nbytes = 0
        self._views: dict[int, Tensor] = {}
        self._timings: deque[CopyTiming] = deque(maxlen=LATE_COPIES)
        self._late: deque[float] = deque(maxlen=LATE_COPIES)
        self._at_limit = not self._crossing
        self.note: str | None = None

    def begin_copy(self, training: torch.cuda.Stream) -> CopyTiming:
        """Return the timing of a copy that may begin when the `training` stream has finished its present work."""
        if not self._at_limit:
            self._adapt()
        timing = CopyTiming(self._total - self.nbytes)
        timing.ready.record(training)
        if not self._at_limit:
            self._timings.append(timing)
        return timing

    def stage(self, values: Sequence[Tensor]) -> dict[int, Tensor]:
        """Copy the staged tensors on the current stream, which is always the same. Returns the copies by index."""
        for i, view in self._views.items():
            view.copy_(values[i], non_blocking=True)
        return self._views

    def _adapt(self) -> None:
        while self._timings and (late := self._timings[0].late_bytes()) is not None:
            self._timings.popleft()
            self._late.append(late)
        if len(self._late) == LATE_COPIES and min(self._late) > 0:
            self._grow(int(MARGIN * min(self._late)))

    def _grow(self, nbytes: int) -> None:
        """Stage about `nbytes` more, within the limits."""
        self._late.clear()
        self._timings.clear()  # they were measured with less staging
        limit = min(free_device_bytes(self._device) // 8, self._total // 2 - self.nbytes)
        self._at_limit = nbytes >= limit
        chosen = self._choose(min(nbytes, limit), limit)
        size = sum(_aligned(self.layout.size(i)) for i in chosen)
        try:
            memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        except RuntimeError:  # out of memory
            chosen = []
        if not chosen:
            self._at_limit = True
            return
        self.nbytes += size
        self.note = (
            f"updates waited for copies to the host: the last {self.nbytes / 1e9:.2f} GB of each snapshot are now staged in "
            "device memory; [snapshot] device_staging = false turns this off"
        )
        start = 0
        for i in chosen:
            self._views[i] = self.layout.view(i, memory[start : start + self.layout.size(i)])
            start += _aligned(self.layout.size(i))

    def _choose(self, nbytes: int, limit: int) -> list[int]:
        """Choose tensors of about `nbytes` together, among those that cross last and are not staged yet."""
        chosen, skipped, wanted, left = [], [], nbytes, limit
        for i in reversed(self._crossing):
            size = _aligned(self.layout.size(i))
            if i in self._views:
                continue
            if size <= wanted:
                chosen.append(i)
                wanted, left = wanted - size, left - size
            else:
                skipped.append(i)
        smallest = min(skipped, key=self.layout.size, default=None)
        if wanted > 0 and smallest is not None and _aligned(self.layout.size(smallest)) <= left:
            chosen.append(smallest)
        return chosen


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]


def _has_passed(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]


def _aligned(nbytes: int) -> int:
    return (nbytes + 255) // 256 * 256
