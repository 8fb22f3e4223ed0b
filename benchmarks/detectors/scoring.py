"""From alarms to numbers: false alarms on clean curves, recall, latency and wasted steps on the others.

Cheap alarms (a step is skipped or clipped) and costly ones (roll back, stop) are scored apart. On clean curves alarms
within 50 steps of the one before count once, since no remedy is applied twice to the same moment. An event is found by
an alarm from its first step to its last and a tolerance after; the first alarm there sets the latency.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from benchmarks.detectors.alarms import Alarm, Scored
from benchmarks.detectors.healthy_run import Curve, Event
from benchmarks.detectors.intervals import poisson, wilson

LATCH = 50
TOLERANCE = {
    "divergence_fast": 80,
    "divergence_slow": 100,
    "divergence_oscillating": 80,
    "collapse_to_uniform": 80,
    "hard_divergence": 100,
}
"""steps after an event in which an alarm still finds it; 10 for all others"""


class Found(NamedTuple):
    """What became of one event; None where no alarm of that sort came."""

    kind: str
    any: int | None
    """latency of the first alarm, in steps"""
    costly: int | None
    """latency of the first costly alarm"""
    wasted: int | None
    """steps lost: since the point rolled back to, or 1 for a skip"""


class Verdict(NamedTuple):
    """One detector on one curve."""

    kind: str
    seed: int
    steps: int
    false_costly: int
    false_cheap: int
    found: tuple[Found, ...]


def latched(steps: Iterable[int]) -> int:
    """How many alarms these are, when one within `LATCH` steps of the one before is the same."""
    count, last = 0, -math.inf
    for step in sorted(steps):
        count += step - last > LATCH
        last = step
    return count


def judge(curve: Curve, alarms: list[Alarm]) -> Verdict:
    """Score the alarms of one curve. On a curve with events nothing is false: what comes after them may be theirs."""
    if curve.clean:
        false = [latched(a.step for a in alarms if a.costly is costly) for costly in (True, False)]
        return Verdict(curve.kind, curve.seed, len(curve), false[0], false[1], ())
    ends = [e.start for e in curve.events[1:]] + [len(curve)]
    found = tuple(_find(event, alarms, until) for event, until in zip(curve.events, ends, strict=True))
    return Verdict(curve.kind, curve.seed, len(curve), 0, 0, found)


def _find(event: Event, alarms: list[Alarm], until: int) -> Found:
    last = min(event.end + TOLERANCE.get(event.kind, 10), until - 1)
    inside = [a for a in alarms if event.start <= a.step <= last]
    if not inside:
        return Found(event.kind, None, None, None)
    first = min(a.step for a in inside)
    costly = min((a for a in inside if a.costly), default=None)
    return Found(
        event.kind,
        first - event.start,
        None if costly is None else costly.step - event.start,
        1 if costly is None else costly.step - min(costly.back_to, event.start),
    )


@dataclass
class Recall:
    """Of one class of events, for one sort of alarm."""

    events: int = 0
    latencies: list[int] = field(default_factory=list)

    @property
    def share(self) -> float:
        return len(self.latencies) / self.events if self.events else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(len(self.latencies), self.events)

    @property
    def median(self) -> float:
        return float(np.median(self.latencies)) if self.latencies else math.nan

    @property
    def p95(self) -> float:
        return float(np.percentile(self.latencies, 95)) if self.latencies else math.nan

    def within(self, steps: int) -> float:
        return sum(value <= steps for value in self.latencies) / self.events if self.events else math.nan


class Rate(NamedTuple):
    """False alarms per 10,000 clean steps, with an exact 95% interval."""

    count: int
    steps: int

    @property
    def value(self) -> float:
        return 1e4 * self.count / self.steps if self.steps else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        low, high = poisson(self.count)
        return (1e4 * low / self.steps, 1e4 * high / self.steps) if self.steps else (0.0, math.inf)


@dataclass
class Score:
    """All verdicts of one detector, added up."""

    name: str
    costly_alarms: bool = True
    verdicts: list[Verdict] = field(default_factory=list)

    def false(self, costly: bool | None = None, kind: str | None = None) -> Rate:
        """False alarms; `costly` None: of either sort."""
        clean = [v for v in self.verdicts if not v.found and (kind is None or v.kind == kind)]
        count = sum(
            (v.false_costly if costly is not False else 0) + (v.false_cheap if costly is not True else 0) for v in clean
        )
        return Rate(count, sum(v.steps for v in clean))

    def recall(self, kinds: Iterable[str], costly: bool = False) -> Recall:
        """Over all events of these kinds; `costly`: by a costly alarm, otherwise by any."""
        wanted, recall = set(kinds), Recall()
        for found in (f for v in self.verdicts for f in v.found if f.kind in wanted):
            recall.events += 1
            latency = found.costly if costly else found.any
            if latency is not None:
                recall.latencies.append(latency)
        return recall

    def wasted(self, kinds: Iterable[str]) -> float:
        """Mean steps lost over the events found."""
        wanted = set(kinds)
        lost = [f.wasted for v in self.verdicts for f in v.found if f.kind in wanted and f.wasted is not None]
        return float(np.mean(lost)) if lost else math.nan

    def by_kind(self) -> dict[str, tuple[int, int]]:
        """False alarms of each clean kind: costly, cheap."""
        table: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for v in self.verdicts:
            if not v.found:
                table[v.kind][0] += v.false_costly
                table[v.kind][1] += v.false_cheap
        return {kind: (a, b) for kind, (a, b) in table.items()}


def score(detector: Scored, curves: Iterable[Curve]) -> Score:
    """Run one detector over curves, here and now."""
    return Score(detector.name, detector.costly, [judge(curve, detector.run(curve)) for curve in curves])
