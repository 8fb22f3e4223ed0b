"""The last part of a copy to the host, put aside on the device where the bus is too slow for the time between two updates.

An update must not overwrite what is still being read. Where updates have had to wait for it again and again, as much of the
next copies as was late is copied within the device first, at the speed of its memory, and crosses to the host from there
while the update goes on. That takes memory of the device: what is needed and no more, and at most an eighth of what is free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from holdfast.runtime.snapshots.layout import Layout
from holdfast.runtime.snapshots.memory import free_on

LATE = 0.3
"""milliseconds that an update may wait for a copy without anything being done about it"""
IN_A_ROW = 3
MARGIN = 1.25


class Times:
    """When a copy could begin, when its part that updates wait for began and ended, and when the next update was there."""

    def __init__(self, nbytes: int) -> None:
        self.ready, self.begun, self.over, self.asked = (_event() for _ in range(4))
        self._nbytes = nbytes
        self._has_been_asked = False

    def ask(self, stream: torch.cuda.Stream) -> None:
        """The update is next on that stream."""
        if not self._has_been_asked:
            self.asked.record(stream)
            self._has_been_asked = True

    def late(self) -> float | None:
        """Bytes that were still to come when the update was there, 0 where it did not wait; None: not known yet."""
        if not (self._has_been_asked and _past(self.over) and _past(self.asked)):
            return None
        took = self.begun.elapsed_time(self.over)
        late = self.ready.elapsed_time(self.over) - self.ready.elapsed_time(self.asked)
        return self._nbytes * late / took if late > LATE and took > 0 else 0.0


class Aside:
    """For the copies of one layout that cross from one device."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout, self._device = layout, device
        self._crossing = [i for i in layout.alone if layout.device(i) == device]
        self._whole = sum(map(layout.size, self._crossing))
        self.nbytes = 0
        self._views: dict[int, Tensor] = {}
        self._times: deque[Times] = deque(maxlen=IN_A_ROW)
        self._late: deque[float] = deque(maxlen=IN_A_ROW)
        self._enough = not self._crossing
        """there is no more to be had"""
        self.note: str | None = None
        """what has been done, for the user"""

    def times(self, training: torch.cuda.Stream) -> Times:
        """For the copy that may begin now, after what that stream has been given."""
        if not self._enough:
            self._learn()
        times = Times(self._whole - self.nbytes)
        times.ready.record(training)
        if not self._enough:
            self._times.append(times)
        return times

    def put(self, values: Sequence[Tensor]) -> dict[int, Tensor]:
        """Copy those that are put aside, on the current stream, which is always the same. Returns where they are now, by
        their place in the layout."""
        for i, view in self._views.items():
            view.copy_(values[i], non_blocking=True)
        return self._views

    def _learn(self) -> None:
        while self._times and (late := self._times[0].late()) is not None:
            self._times.popleft()
            self._late.append(late)
        if len(self._late) == IN_A_ROW and min(self._late) > 0:
            self._take(int(MARGIN * min(self._late)))

    def _take(self, nbytes: int) -> None:
        """So much more."""
        self._late.clear()
        self._times.clear()  # of copies that knew nothing of it
        most = min(free_on(self._device) // 8, self._whole // 2 - self.nbytes)
        self._enough = nbytes >= most
        chosen = self._choose(min(nbytes, most), most)
        size = sum(_aligned(self.layout.size(i)) for i in chosen)
        try:
            memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        except RuntimeError:  # there is none
            chosen = []
        if not chosen:
            self._enough = True
            return
        self.nbytes += size
        self.note = (
            f"updates have waited for copies to the host: the last {self.nbytes / 1e9:.2f} GB of each are put aside in the "
            "device's memory from here on; [snapshot] device_staging = false forbids it"
        )
        at = 0
        for i in chosen:
            self._views[i] = self.layout.view(i, memory[at : at + self.layout.size(i)])
            at += _aligned(self.layout.size(i))

    def _choose(self, nbytes: int, most: int) -> list[int]:
        """Of those that cross last, and are not put aside yet, as many as make up so much."""
        chosen, others, room, left = [], [], nbytes, most
        for i in reversed(self._crossing):
            size = _aligned(self.layout.size(i))
            if i in self._views:
                continue
            if size <= room:
                chosen.append(i)
                room, left = room - size, left - size
            else:
                others.append(i)
        smallest = min(others, key=self.layout.size, default=None)
        if room > 0 and smallest is not None and _aligned(self.layout.size(smallest)) <= left:
            chosen.append(smallest)
        return chosen


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]


def _past(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]


def _aligned(nbytes: int) -> int:
    return (nbytes + 255) // 256 * 256
