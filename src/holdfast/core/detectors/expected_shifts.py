"""Expected shifts that the user need not declare: a change of the step itself, not of its result.

With another batch size, another sequence length, or a learning rate back at an earlier level, the loss may change its
level. The detectors then learn the new one. Non-finite and gross alarms are never muted.
"""

from __future__ import annotations

import math
from typing import Any

from holdfast.core.base.types import Flag, Signal, Span

LR_JUMP = 1.5
_STEADY_STEPS = 50
_AT_PEAK = 1.05
_NONFINITE = int(Flag.LOSS_NONFINITE | Flag.GRAD_NONFINITE)


class _SteadyValue:
    """Tracks a number that is usually constant. It has changed after two steps in a row at another value."""

    def __init__(self) -> None:
        self.value: float | None = None
        self.count = 0
        self.other: float | None = None

    def update(self, value: float | None) -> tuple[float, float] | None:
        """Return the old and the new value if the number has changed."""
        if value is None:
            return None
        if value == self.value:
            self.count += 1
            self.other = None
            return None
        if self.value is not None and self.count >= _STEADY_STEPS and value != self.other:
            self.other = value  # the short batch at the end of an epoch differs once only
            return None
        before, steady = self.value, self.count >= _STEADY_STEPS
        self.value, self.count, self.other = value, 1, None
        return (before, value) if steady and before is not None else None


class ExpectedShifts:
    """Recognises expected shifts; `observe` each signal before the detectors do.

    `by_lr`: over a log, a jump of the learning rate back to an earlier level is a restart of its schedule. In a run the
    guard asks the scheduler instead, and does not trust a jump that the scheduler did not make.
    """

    def __init__(self, *, by_lr: bool = False) -> None:
        self._by_lr = by_lr
        self._batch = _SteadyValue()
        self._length = _SteadyValue()
        self._lr: float | None = None
        self._peak = 0.0
        self._data: tuple[Span, ...] = ()

    def observe(self, signal: Signal) -> str | None:
        """Return the reason for a shift, or None.

        A step vetoed for a high loss counts, since another length may be the cause. A step that overflowed or is not
        finite does not count, nor does a replay of the same data.
        """
        if signal.overflow or signal.flags & _NONFINITE:
            return None
        if signal.data and signal.data == self._data:
            return None
        self._data = signal.data
        by_lr = self.lr(signal.lr) if self._by_lr else None
        by_batch, by_length = self.batch(signal.samples), self.length(signal.length)
        return by_batch or by_length or by_lr

    def batch(self, size: float | None) -> str | None:
        change = self._batch.update(size)
        return None if change is None else f"the batch size went from {change[0]:g} to {change[1]:g} samples"

    def length(self, length: float | None) -> str | None:
        change = self._length.update(length)
        return None if change is None else f"the sequence length went from {change[0]:g} to {change[1]:g}"

    def lr(self, lr: float | None) -> str | None:
        if lr is None or not math.isfinite(lr):
            return None
        last, peak = self._lr, self._peak
        self._lr, self._peak = lr, max(peak, lr)
        if last is None or not LR_JUMP * last < lr <= _AT_PEAK * peak:
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
