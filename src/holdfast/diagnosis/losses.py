"""The losses of a log as the detectors see them: read once, scanned once, for all who ask."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from holdfast.core.config import Detect
from holdfast.core.detectors.scan import Rows, recognised, scan
from holdfast.diagnosis.table import Table

Floats = NDArray[np.float64]
LEAST_POINTS = 12
BEFORE = 30
_NEW_START = 60


def settings(points: int, interval: float) -> Detect:
    """The detectors as online; a short log cannot spare as many rows to learn from."""
    patience = max(200.0, 0.25 * points) * interval
    return Detect(warmup_steps=max(8, min(40, points // 8)), plateau_steps=max(1, int(min(patience, 1e9))))


class Losses:
    """The rows that have a loss, where the detectors start anew, and what they found."""

    def __init__(self, table: Table) -> None:
        self.table = table
        rows = Rows(table)
        self.rows, self.step = rows.rows, rows.step
        self.loss: Floats = np.asarray(rows.fields.get("loss", []), dtype=float)
        self.finite = np.isfinite(self.loss)
        self.negative = bool((self.loss[self.finite] < 0).any())
        """a reward, a bound, a log likelihood of densities: such losses swing, and may rise and mean no harm"""
        self.shifts = sorted({*recognised(rows), *_went_back(rows.step)})
        declared = [self.rows[place] for place in self.shifts]
        enough = len(self.loss) >= LEAST_POINTS
        self.settings = settings(len(self.loss), table.interval())
        self.findings = scan(table, self.settings, shifts=declared) if enough else []
        self.place = _places(self.step)

    def near_shift(self, place: int) -> int | None:
        """The shift a place lies just behind, if any."""
        behind = [s for s in self.shifts if s <= place + 1 and place - s <= _NEW_START]
        return behind[-1] if behind else None

    def before(self, place: int) -> Floats:
        """The finite losses just before a place, since the last shift."""
        since = max((s for s in self.shifts if s <= place), default=0)
        part = self.loss[max(since, place - BEFORE) : place]
        return part[np.isfinite(part)]


def _went_back(steps: list[float]) -> list[int]:
    return [i for i in range(1, len(steps)) if steps[i] < steps[i - 1]]


def _places(steps: list[float]) -> dict[int, list[int]]:
    places: dict[int, list[int]] = {}
    for i, step in enumerate(steps):
        places.setdefault(int(step), []).append(i)
    return places
