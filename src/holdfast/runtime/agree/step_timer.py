"""Times the phases of a step on this rank, from one exchange of rows to the next. One process times nothing."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.runtime.tensors.device_span import DeviceSpan


class StepTimer:
    """Holds the times of the step in progress. Nothing waits for a device: its time is known a step later."""

    def __init__(self, now: Callable[[], float], span: DeviceSpan | None = None) -> None:
        self.now, self._span = now, span
        self._exchanged_at = self._entered_at = now()
        self._between = self._data = self._waited = self._data_before = 0.0

    def add_data(self, began: float) -> None:
        """Count the time since `began` as time in the loader."""
        self._data += self.now() - began

    def add_wait(self, began: float) -> None:
        """Count the time since `began` as time waiting for the device or for other ranks."""
        self._waited += self.now() - began

    def enter(self) -> None:
        """Note that the forward begins."""
        self._between = self.now() - self._exchanged_at - self._data
        self._entered_at, self._data_before = self.now() - self._data, self._data
        if self._span is not None:
            self._span.begin()

    def phases(self, last_gradient_at: float | None, *, on_device: bool) -> tuple[float, float, float, float]:
        """Return the seconds between steps, in the loader, computing, and waiting. A row is about to be sent.

        last_gradient_at: when the step's last gradient arrived, before the ranks averaged it; None if that is not known.
        on_device: the device runs behind the host. While the host still has to wait for it, the host's work cost nothing.
        Forward and backward are as long as the device took for those of the step before, if that is known.
        """
        now = self.now()
        computed_at = now if last_gradient_at is None else last_gradient_at
        compute = computed_at - self._entered_at - self._data
        own = self._between, self._data, compute
        lead = self._waited if on_device else 0.0
        between, data, compute = (max(0.0, seconds - lead) for seconds in own)
        if self._span is not None and last_gradient_at is not None:
            device_seconds = self._span.seconds()
            compute = compute if device_seconds is None else device_seconds
            self._span.end(self._data - self._data_before)
        return between, data, compute, now - computed_at + self._waited

    def exchanged(self, began: float) -> None:
        """Note that the rows have arrived, which were sent at `began`: the next step's times begin."""
        self._exchanged_at = self._entered_at = self.now()
        self._between = self._data = 0.0
        self._waited = self._exchanged_at - began
