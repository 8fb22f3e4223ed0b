"""A copy that is being made in the background: what to wait for, and the result of inspecting it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.runtime.ports.checkpoint_store import CopyInspection
from holdfast.runtime.snapshots.buffer_pool import SnapshotBuffer
from holdfast.runtime.snapshots.device_staging import CopyTiming
from holdfast.runtime.snapshots.shares import Share
from holdfast.runtime.tensors.inspect import known_finite
from holdfast.runtime.tensors.torch_private import version_of


class StreamWork(NamedTuple):
    """Work enqueued on a side stream."""

    device: torch.device
    read: torch.cuda.Event
    """the sources have been read and may change"""
    done: torch.cuda.Event
    timing: CopyTiming | None = None


class WriteDetector:
    """Detects in-place writes to tensors while they are copied: such a copy is a state that never existed."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._versions = _versions(tensors)

    def detected(self) -> bool:
        return _versions(self._tensors) != self._versions


class CopyStart:
    """The moment whose state is copied. The copy may be enqueued later, as long as no update is."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        # A forward may give a parameter other memory (`p.data = ...`): these keep what it has now.
        self.tensors = {name: value.detach() for name, value in tensors.items()}
        self.writes = WriteDetector(list(self.tensors.values()))
        devices = {value.device for value in self.tensors.values() if value.is_cuda}
        self._events = {device: torch.cuda.Event() for device in devices}  # type: ignore[no-untyped-call]
        for device, event in self._events.items():
            event.record(torch.cuda.current_stream(device))

    def wait(self, stream: torch.cuda.Stream) -> None:
        """Have a stream wait for the work that its device had at that moment."""
        stream.wait_event(self._events[stream.device])


class SnapshotCopy:
    """Tensors that are being filled. `buffer` is their memory; None if the tensors are kept as they were given."""

    def __init__(
        self,
        tensors: dict[str, Tensor],
        work: Sequence[StreamWork] = (),
        buffer: SnapshotBuffer | None = None,
        writes: WriteDetector | None = None,
    ) -> None:
        self.tensors, self.buffer = tensors, buffer
        self.copied = threading.Event()
        self.inspected: Future[CopyInspection] = Future()
        self._progress = threading.Condition()
        self._copied_names: set[str] = set()
        self._work = work
        self._writes = writes
        self._torn = False
        self.share: Share | None = None
        """what `tensors` are of the state, if other ranks keep the rest of it"""

    @property
    def on_device(self) -> bool:
        """Whether CUDA streams make the copy."""
        return bool(self._work)

    def wait(self) -> None:
        """Wait until the sources may change. For CUDA sources the current streams wait, not the host."""
        if not self._work:
            self.copied.wait()
            return
        for work in self._work:
            stream = torch.cuda.current_stream(work.device)
            if work.timing is not None:
                work.timing.record_update(stream)
            stream.wait_event(work.read)
        if self._writes is not None:
            self._torn, self._writes = self._writes.detected(), None

    def wait_for(self, name: str) -> None:
        """Block until the tensor of that name is copied, or copying has ended."""
        if self._work:
            self.copied.wait()
            self.synchronize()
        else:
            with self._progress:
                self._progress.wait_for(lambda: name in self._copied_names or self.copied.is_set())

    def synchronize(self) -> None:
        """Block the host until the streams are done."""
        for work in self._work:
            work.done.synchronize()

    def mark_copied(self, names: Sequence[str] | None) -> None:
        """Wake those who wait for these names; None: copying has ended."""
        with self._progress:
            if names is None:
                self.copied.set()
            else:
                self._copied_names.update(names)
            self._progress.notify_all()

    def finite_names(self) -> set[str]:
        """Return the small host tensors that are finite, by one test of each row of them."""
        if self.buffer is None:
            return set()
        layout = self.buffer.layout
        rows = [row for device, row in layout.rows if known_finite(self.buffer.row(device, row))]
        return {layout.names[i] for row in rows for i in row.members}

    def result(self) -> CopyInspection:
        """Block until the copy is inspected, and return the result. Raises the error that ended the copy."""
        inspection = self.inspected.result()
        return inspection._replace(torn=True) if self._torn else inspection


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return the version counters; 0 for inference tensors, which have none."""
    return [version_of(t) for t in tensors]
