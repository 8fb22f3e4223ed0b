"""A loss and gradient norm that never change, or are all zero: the curve looks perfect, but nothing is trained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Finding, Kind, Severity, Signal
from holdfast.core.detectors.base import LimitlessDetector

_ZERO_RECORDS, _SAME_RECORDS = 32, 200


class DeadRun(LimitlessDetector):
    """Reports loss and gradient norm that are both zero, or both exactly the same as before, for a long time.

    The finding is a note, logged as a warning. Without a gradient norm the loss alone decides, after twice as long.
    """

    name = "dead_run"
    field, needs_loss, max_block = "loss", True, 1024

    def __init__(self, config: DetectSection) -> None:
        del config
        self._last: tuple[float, float | None] | None = None
        self._count = 0
        self._since = 0

    def observe(self, signal: Signal) -> Finding | None:
        norm = signal.grad_norm if signal.grad_norm is not None and math.isfinite(signal.grad_norm) else None
        now = (signal.loss, norm)
        if not math.isfinite(signal.loss) or signal.overflow or signal.flags:
            return None
        if now != self._last:
            self._last, self._count, self._since = now, 1, signal.step
            return None
        self._count += 1
        zero = signal.loss == 0.0 and norm in (0.0, None)
        enough = (_ZERO_RECORDS if zero else _SAME_RECORDS) * (1 if norm is not None else 2)
        if self._count != enough:
            return None
        what = "zero" if zero else f"exactly {signal.loss!r}"
        message = f"the loss has been {what} for {self._count} records: nothing is being trained"
        evidence = {"loss": signal.loss, "grad_norm": signal.grad_norm, "lr": signal.lr, "records": self._count}
        return self.report(signal, Kind.DEAD_RUN, Severity.NOTE, self._since, message, evidence)

    def absorb_normal(self, losses: Sequence[float], steps: Sequence[float]) -> int:
        """Take in losses that differ from the one before, except the last, and return their number."""
        previous, count = None if self._last is None else self._last[0], len(losses) - 1
        for i, loss in enumerate(losses):
            if loss == previous:
                count = i - 1
                break
            previous = loss
        if count > 0:
            self._last = None
        return max(0, count)

    def rebaseline(self) -> None:
        self._last = None

    def state_dict(self) -> dict[str, Any]:
        return {"last": None if self._last is None else list(self._last), "count": self._count, "since": self._since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        last = state["last"]
        self._last = None if last is None else (last[0], last[1])
        self._count, self._since = state["count"], state["since"]
