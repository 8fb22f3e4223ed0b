"""Expected shifts that nobody has to declare: what changed in the step itself, not in how it went.

Another batch size, another sequence length, or a learning rate that returns to where it has been: the loss may change
level, and the detectors are to learn the new one. Non-finite and gross alarms are never muted.
"""

from __future__ import annotations

import math
from typing import Any

from holdfast.core.base.types import Flag, Signal, Span

LR_JUMP = 1.5
_STEADY = 50
_BACK_AT_PEAK = 1.05
_NONFINITE = int(Flag.LOSS_NONFINITE | Flag.GRAD_NONFINITE)


class _Steady:
    """A number that has stood still. It has changed when it stands still at another value for two steps running."""

    def __init__(self) -> None:
        self.value: float | None = None
        self.count = 0
        self.other: float | None = None

    def changed(self, value: float | None) -> tuple[float, float] | None:
        if value is None:
            return None
        if value == self.value:
            self.count += 1
            self.other = None
            return None
        if self.value is not None and self.count >= _STEADY and value != self.other:
            self.other = value  # the short batch at the end of an epoch looks like this
            return None
        before, steady = self.value, self.count >= _STEADY
        self.value, self.count, self.other = value, 1, None
        return (before, value) if steady and before is not None else None


class Shifts:
    """`observe` each signal before the detectors do; the reason for a shift, or None.

    `by_lr`: over a log, a jump of the learning rate back to where it has been is a restart of its schedule. Online the
    scheduler itself says so, and a jump it did not make is not to be trusted.
    """

    def __init__(self, *, by_lr: bool = False) -> None:
        self._by_lr = by_lr
        self._batch = _Steady()
        self._length = _Steady()
        self._lr: float | None = None
        self._peak = 0.0
        self._data: tuple[Span, ...] = ()

    def observe(self, signal: Signal) -> str | None:
        """A step kept back for a high loss counts: another length may be what raised it. One that overflowed or is not
        finite does not, nor does the same data served again."""
        if signal.overflow or signal.flags & _NONFINITE:
            return None
        if signal.data and signal.data == self._data:
            return None
        self._data = signal.data
        by_lr = self.lr(signal.lr) if self._by_lr else None
        by_batch, by_length = self.batch(signal.samples), self.length(signal.length)
        return by_batch or by_length or by_lr

    def batch(self, size: float | None) -> str | None:
        moved = self._batch.changed(size)
        return None if moved is None else f"the batch size went from {moved[0]:g} to {moved[1]:g} samples"

    def length(self, length: float | None) -> str | None:
        moved = self._length.changed(length)
        return None if moved is None else f"the sequence length went from {moved[0]:g} to {moved[1]:g}"

    def lr(self, lr: float | None) -> str | None:
        if lr is None or not math.isfinite(lr):
            return None
        last, peak = self._lr, self._peak
        self._lr, self._peak = lr, max(peak, lr)
        if last is None or not LR_JUMP * last < lr <= _BACK_AT_PEAK * peak:
            return None
        return f"the learning rate went from {last:.4g} back to {lr:.4g}"

    def state_dict(self) -> dict[str, Any]:
        return {
            "batch": dict(self._batch.__dict__),
            "length": dict(self._length.__dict__),
            "lr": self._lr,
            "peak": self._peak,
            "data": [list(span) for span in self._data],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._batch.__dict__.update(state["batch"])
        self._length.__dict__.update(state["length"])
        self._lr, self._peak = state["lr"], state["peak"]
        self._data = tuple(Span(*span) for span in state["data"])
