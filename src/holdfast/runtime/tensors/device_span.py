"""Times what a device does between two moments of a step, by events. A span is read later, so nothing waits for it."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch


class _Span(NamedTuple):
    begun: torch.cuda.Event
    ended: torch.cuda.Event
    idle_seconds: float


class DeviceSpan:
    """Times forward and backward on a CUDA device, up to the last gradient. On other devices it does nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._begun: torch.cuda.Event | None = None
        self._ended: torch.cuda.Event | None = None
        self._unread: deque[_Span] = deque(maxlen=4)
        self._seconds: float | None = None

    def begin(self) -> None:
        """Note that work of the step is enqueued from now on."""
        if self._device is not None and not torch.cuda.is_current_stream_capturing():
            self._begun, self._ended = _event(), None
            self._begun.record(torch.cuda.current_stream(self._device))

    def extend(self) -> None:
        """Note that what is enqueued by now belongs to the span."""
        if self._device is not None and not torch.cuda.is_current_stream_capturing():
            self._ended = self._ended or _event()
            self._ended.record(torch.cuda.current_stream(self._device))

    def end(self, idle_seconds: float = 0.0) -> None:
        """End the span where it was extended to. The device had nothing to do for `idle_seconds` of it."""
        if self._begun is not None and self._ended is not None:
            self._unread.append(_Span(self._begun, self._ended, idle_seconds))
        self._begun = self._ended = None

    def seconds(self) -> float | None:
        """Return the length of the last span that the device has passed; None if there is none."""
        while self._unread and self._unread[0].ended.query():  # type: ignore[no-untyped-call]
            span = self._unread.popleft()
            self._seconds = max(0.0, 1e-3 * span.begun.elapsed_time(span.ended) - span.idle_seconds)
        return self._seconds


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
