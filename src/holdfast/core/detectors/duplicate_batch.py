"""A batch that was used a short while ago: the loader repeats data. The finding is a note."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Finding, Kind, Severity, Signal
from holdfast.core.detectors.base import LimitlessDetector

_REMEMBERED_BATCHES = 512
_REPEATS, _RECENT_BATCHES = 3, 8


class DuplicateBatch(LimitlessDetector):
    """Compares batches by fingerprint; `_REPEATS` repeats among the last `_RECENT_BATCHES` batches are a finding.

    It remembers `_REMEMBERED_BATCHES`. A data set with shorter epochs repeats by design: then the distance between
    repeats is the length of an epoch, and it is reported once.
    """

    name = "duplicate_batch"
    field = "batch"

    def __init__(self, config: DetectSection) -> None:
        del config
        self._last_step: OrderedDict[int, int] = OrderedDict()
        """fingerprint -> the step it was last used at, oldest first"""
        self._distances: list[int] = []
        """for each recent batch, the steps since it was last used; 0: it is new"""
        self._reported_distance: int | None = None

    def observe(self, signal: Signal) -> Finding | None:
        if signal.batch is None or signal.attempt > 1:
            return None
        last_step, distances = self._last_step, self._distances
        before = last_step.pop(signal.batch, None)
        last_step[signal.batch] = signal.step
        if len(last_step) > _REMEMBERED_BATCHES:
            last_step.popitem(last=False)
        distance = 0 if before is None else signal.step - before
        distances.append(max(0, distance))
        del distances[:-_RECENT_BATCHES]
        if not any(distances):
            self._reported_distance = None
            return None
        repeats = [d for d in distances if d > 0]
        if len(repeats) < _REPEATS or distance <= 0 or self._reported_distance is not None:
            return None
        self._reported_distance = distance
        message = f"{len(repeats)} of the last {len(distances)} batches are repeats, this one of {distance} steps ago"
        if distance >= _RECENT_BATCHES:
            message += "; an epoch of that length in the same order would look like this"
        evidence = {"distance": distance, "repeats": len(repeats), "batch": signal.batch}
        return self.report(signal, Kind.DUPLICATE_BATCH, Severity.NOTE, signal.step - distance, message, evidence)

    def rebaseline(self) -> None:
        self._last_step.clear()
        self._distances = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self._last_step.items()), "recent": list(self._distances), "said": self._reported_distance}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last_step = OrderedDict((int(k), int(v)) for k, v in state["seen"])
        self._distances, self._reported_distance = list(state["recent"]), state["said"]
