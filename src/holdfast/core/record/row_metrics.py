"""The numbers of a row of metrics.jsonl that follow from its step and the rows before it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from holdfast.core.base.types import Signal, Status
from holdfast.core.record.step_times import PhaseSplit

_SMOOTHING = 0.02
"""weight of one loss in the smoothed one, once there are enough of them"""


class RowMetrics:
    """Adds time, speed and the smoothed loss to rows, in order. Used by one thread."""

    def __init__(
        self,
        times: PhaseSplit | None,
        wall: Callable[[], float],
        now_ns: Callable[[], int],
        facts: Callable[[], Mapping[str, Any]] = dict,
        peak_flops: Callable[[Mapping[str, Any]], float | None] = lambda facts: None,
    ) -> None:
        self._times, self._wall, self._now_ns = times, wall, now_ns
        self._facts, self._find_peak = facts, peak_flops
        self._peak: float | None = None
        """the peak of all devices together, once FLOPs are known; 0 if it is not known"""
        self._smooth, self._count = 0.0, 0

    def fields(
        self,
        signal: Signal,
        status: str,
        at: int,
        update_ns: int = 0,
        wait_ns: int = 0,
        ranks: NDArray[np.float64] | None = None,
    ) -> dict[str, Any]:
        """Return the added fields of one row.

        at: when its step was settled. update_ns, wait_ns: see PhaseSplit. ranks: seconds of every rank between steps, in the
        loader, computing and waiting.
        """
        row: dict[str, Any] = {"time": round(self._wall() - (self._now_ns() - at) / 1e9, 3)}
        is_committed = status == Status.COMMITTED
        if is_committed and math.isfinite(signal.loss):
            row["loss_smooth"] = self._smoothed(signal.loss)
        seconds, phases = (None, None) if self._times is None else self._times.take(at, update_ns, wait_ns)
        if seconds is None:
            return row
        row["step_seconds"] = round(seconds, 6)
        if phases is not None:
            row["phases"] = phases
        if ranks is not None and ranks.shape[1] > 1:
            busy = ranks[:3].sum(axis=0)
            slowest = int(busy.argmax())
            row["slowest_rank"] = slowest
            row["straggler_seconds"] = round(float(busy[slowest] - np.median(busy)), 6)
        if is_committed and seconds > 0:
            self._add_speed(row, signal, seconds)
        return row

    def _smoothed(self, loss: float) -> float:
        self._count += 1
        weight = max(_SMOOTHING, 1 / self._count)
        self._smooth += weight * (loss - self._smooth)
        return round(self._smooth, 6)

    def _add_speed(self, row: dict[str, Any], signal: Signal, seconds: float) -> None:
        facts = self._facts()
        tokens = None if signal.samples is None or signal.length is None else signal.samples * signal.length
        if tokens is None:
            tokens = facts.get("tokens_per_step")
        flops, flops_per_token = facts.get("flops_per_step"), facts.get("flops_per_token")
        if flops is None and _is_above_zero(tokens) and _is_above_zero(flops_per_token):
            flops = flops_per_token * tokens
        if _is_above_zero(tokens):
            row["tokens_per_second"] = round(tokens / seconds, 1)
        if _is_above_zero(flops):
            if self._peak is None:
                self._peak = self._find_peak(facts) or 0.0
            if self._peak:
                row["mfu"] = round(flops / seconds / self._peak, 4)


def _is_above_zero(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and 0 < value < math.inf
