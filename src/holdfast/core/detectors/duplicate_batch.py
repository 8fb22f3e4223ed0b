"""A batch that was seen a short while ago: a loader that repeats itself. On record only."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Finding, Kind, Severity, Signal
from holdfast.core.detectors.base import Unlimited

_REMEMBERED = 512
_ENOUGH = 3
_OFTEN = 8


class DuplicateBatch(Unlimited):
    """Fingerprints of the last `_REMEMBERED` batches; `_ENOUGH` repeats among the last `_OFTEN` batches are a finding.

    A data set so small that an epoch fits into what is remembered repeats by design: the distance of the repeats is
    then the length of an epoch, and it is said once.
    """

    name = "duplicate_batch"
    field = "batch"

    def __init__(self, config: DetectSection) -> None:
        del config
        self._seen: OrderedDict[int, int] = OrderedDict()
        self._recent: list[int] = []
        self._said: int | None = None

    def observe(self, signal: Signal) -> Finding | None:
        if signal.batch is None or signal.attempt > 1:
            return None
        seen, recent = self._seen, self._recent
        before = seen.pop(signal.batch, None)
        seen[signal.batch] = signal.step
        if len(seen) > _REMEMBERED:
            seen.popitem(last=False)
        distance = 0 if before is None else signal.step - before
        recent.append(max(0, distance))
        del recent[:-_OFTEN]
        if not any(recent):
            self._said = None
            return None
        repeats = [d for d in recent if d > 0]
        if len(repeats) < _ENOUGH or distance <= 0 or self._said is not None:
            return None
        self._said = distance
        message = (
            f"{len(repeats)} of the last {len(self._recent)} batches are repeats, this one of {distance} steps ago"
        )
        if distance >= _OFTEN:
            message += "; an epoch of that length in the same order would look like this"
        return Finding(
            kind=Kind.DUPLICATE_BATCH,
            severity=Severity.NOTE,
            step=signal.step,
            onset=signal.step - distance,
            detector=self.name,
            message=message,
            evidence={"distance": distance, "repeats": len(repeats), "batch": signal.batch},
        )

    def rebaseline(self) -> None:
        self._seen.clear()
        self._recent = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self._seen.items()), "recent": list(self._recent), "said": self._said}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seen = OrderedDict((int(k), int(v)) for k, v in state["seen"])
        self._recent, self._said = list(state["recent"]), state["said"]
