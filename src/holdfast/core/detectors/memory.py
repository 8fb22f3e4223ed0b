"""Finds memory that grows: a leak, fragmentation, a device that is full, growth on the host. It advises and never acts.

Memory of a healthy run is noisy, and bounded. Its floor (the lowest reading of each block of steps) does not rise for long:
longer sequences, evaluations and checkpoints come and go. A leak raises the floor at every scale, into territory that the
run has not seen, and does not slow down. `Growth` compares floors over windows of doubling length.
"""

from __future__ import annotations

from collections import deque
from itertools import islice, pairwise
from statistics import median
from typing import Any, NamedTuple

from holdfast.core.base.types import Finding, Severity
from holdfast.core.detectors.monotone import mann_kendall
from holdfast.core.detectors.out_of_memory import (
    CAPACITY,
    CURES,
    FRAGMENTATION,
    HOST_GROWTH,
    LEAK,
    Explanation,
    OutOfMemory,
    describe_sizes,
    explain,
    format_bytes,
)

_MB = 1 << 20
_WINDOW, _MIN_BLOCKS = 32, 24
_TREND_Z = 5.0
_LAST_HALF = (0.45, 0.7)
"""the share of the rise that the second half of a window has; growth that slows down comes to an end"""
_PARTS, _SMALL_PART, _STEADY = 8, 4, (0.4, 1.8)
"""parts of a window, and how much of the mean rise each must add: a few large steps are no leak"""
_NEW_TERRITORY = 0.5
"""the share of the rise that is above all earlier floors, at least"""
_STEPS, _FAST_STEPS, _FAST = 1000, 200, 0.25
"""steps that a rise must last: a small one, and one of at least `_FAST` of the level"""
_WARM_UP_READINGS, _WARM_UP_STEPS = 8, 16
_RETRIED_READINGS, _RECENT_READINGS = 8, 32
_PEAK_READINGS, _LEVEL, _OUTGROWN, _LOST = 8, 0.05, 0.25, 0.2
_FULL = 0.85
_HISTORY = 512
_MIN_READINGS, _MAX_FLOORS = 5, 12
_RISING, _OF_LIMIT, _OF_PEAK = 0.75, 0.08, 0.5
"""for a run that is out of memory: rising floors, and the rise as a share of the limit and of the peak's rise"""
_NO_LEAK = "What fills up and then stays full, as a replay buffer does, looks the same until it is full"


class MemoryReading(NamedTuple):
    """Memory at a fixed point of a step, in bytes. What cannot be read is None."""

    step: int
    allocated: int | None = None
    reserved: int | None = None
    peak: int | None = None
    inactive_split: int | None = None
    """unused parts of segments that are in use"""
    retries: int | None = None
    ooms: int | None = None
    limit: int | None = None
    host: int | None = None
    """anonymous memory of this process"""
    host_left: int | None = None
    """bytes of the host that can still be allocated"""
    workers: int | None = None
    """anonymous memory of its child processes that they do not share with it"""
    shm: int | None = None
    shm_left: int | None = None
    page_cache: int | None = None

    def row(self) -> dict[str, float]:
        """Return the fields of a row of metrics.jsonl: sizes in GB."""
        names = ("allocated", "reserved", "peak", "inactive_split", "host", "workers", "shm", "page_cache")
        row = {f"memory_{name}": round(value / 1e9, 6) for name in names if (value := getattr(self, name)) is not None}
        counts = {"memory_retries": self.retries, "memory_ooms": self.ooms}
        return row | {name: count for name, count in counts.items() if count is not None}


class Rise(NamedTuple):
    """A steady rise, in bytes and steps."""

    slope: float
    was: float
    now: float
    steps: float


class _Level:
    """The last floors of blocks of one length."""

    def __init__(self) -> None:
        self.floors: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        self.ceiling = float("-inf")
        """the highest floor that has left the window"""
        self.half: float | None = None
        self.count = 0

    def add(self, position: float, floor: float) -> float | None:
        """Add a floor. Return the floor of the last two if they make a block of the next level."""
        if len(self.floors) == _WINDOW:
            self.ceiling = max(self.ceiling, self.floors[0][1])
        self.floors.append((position, floor))
        self.count += 1
        half, self.half = self.half, floor if self.half is None else None
        return None if half is None else min(half, floor)


class Growth:
    """Follows one series of readings, in bounded memory and time."""

    def __init__(self, min_rise: float, min_share: float, least_level: float = 0.0) -> None:
        self._min_rise, self._min_share, self._least_level = min_rise, min_share, least_level
        self._levels: list[_Level] = []
        self._began: float | None = None

    def add(self, position: float, value: float) -> Rise | None:
        """Add a reading. Return the rise if the floor rises steadily."""
        self._began = position if self._began is None else self._began
        rise, floor = None, value
        for index in range(len(self._levels) + 1):
            if index == len(self._levels):
                self._levels.append(_Level())
            level = self._levels[index]
            block = level.add(position, floor)
            rise = rise or self._judge(level, position - self._began)
            if block is None:
                break
            floor = block
        return rise

    def _judge(self, level: _Level, elapsed: float) -> Rise | None:
        if len(level.floors) < _MIN_BLOCKS or level.count % _SMALL_PART:
            return None
        values = [floor for _, floor in level.floors]
        if median(values[-_SMALL_PART:]) - median(values[:_SMALL_PART]) < self._min_rise:
            return None
        parts = _part_medians(level.floors)
        if parts is None:
            return None
        first, last = parts[0], parts[-1]
        rise, base = (last - first) * _PARTS / (_PARTS - 1), max(first, self._least_level)
        if rise < max(self._min_rise, self._min_share * base):
            return None
        if not _LAST_HALF[0] <= (last - median(parts)) / (last - first) <= _LAST_HALF[1]:
            return None
        if last - max(level.ceiling, first) < _NEW_TERRITORY * (last - first):
            return None
        least, most = (share * (last - first) / (_PARTS - 1) for share in _STEADY)
        if not all(least <= b - a <= most for a, b in pairwise(parts)) or mann_kendall(values) < _TREND_Z:
            return None
        span = level.floors[-1][0] - level.floors[0][0]
        slope = theil_sen(list(level.floors))
        needed = _FAST_STEPS if rise >= _FAST * base else _STEPS
        return Rise(slope, first, values[-1], span) if min(elapsed, 2 * span) >= needed else None


def _part_medians(floors: deque[tuple[float, float]]) -> list[float] | None:
    """Return the median floors of parts of equal length in steps; None if a part has none."""
    begin, end = floors[0][0], floors[-1][0]
    parts: list[list[float]] = [[] for _ in range(_PARTS)]
    for position, floor in floors:
        parts[min(_PARTS - 1, int(_PARTS * (position - begin) / (end - begin)))].append(floor)
    return [median(part) for part in parts] if all(parts) else None


def theil_sen(points: list[tuple[float, float]]) -> float:
    """Return the median slope of all pairs of points."""
    slopes = [(y - x) / (q - p) for i, (p, x) in enumerate(points) for q, y in points[i + 1 :] if q > p]
    return median(slopes) if slopes else 0.0


class MemoryDetector:
    """Watches the memory of one process. Its state is not saved: memory belongs to a process, not to its training."""

    def __init__(self) -> None:
        self._device = Growth(16 * _MB, 0.05)
        self._splits = Growth(64 * _MB, 0.2)
        # Libraries cache kernels for every new shape: a healthy process may grow by 250 MB in its first thousands of steps.
        self._host = Growth(192 * _MB, 0.1, 256.0 * _MB)
        self._workers, self._shm = (Growth(128 * _MB, 0.1, 256.0 * _MB) for _ in range(2))
        self._history: deque[MemoryReading] = deque(maxlen=_HISTORY)
        self._left: dict[str, int] = {}
        """what was left of the host's memory when it was read last"""
        self._retried: deque[bool] = deque(maxlen=_RECENT_READINGS)
        self._first_step: int | None = None
        self._readings = self._position = 0
        """readings so far, and steps run: a rollback does not set them back"""
        self.reported: set[str] = set()

    def observe(self, reading: MemoryReading) -> list[Finding]:
        """Return what is found at this reading; each kind is reported once."""
        last = self._history[-1] if self._history else None
        self._position += 1 if last is None else max(1, reading.step - last.step)
        self._readings += 1
        self._history.append(reading)
        self._left |= {name: left for name in ("host_left", "shm_left") if (left := getattr(reading, name)) is not None}
        if self._readings <= _WARM_UP_READINGS or self._position <= _WARM_UP_STEPS:
            return []
        new = []
        for finding in (*self._check_device(reading, last), *self._check_host(reading)):
            is_consequence = LEAK in self.reported and finding.kind in (FRAGMENTATION, CAPACITY)
            if finding.kind not in self.reported and not is_consequence:
                self.reported.add(finding.kind)
                new.append(finding)
        return new

    def _check_device(self, reading: MemoryReading, last: MemoryReading | None) -> list[Finding]:
        if reading.allocated is None or reading.reserved is None:
            return []
        findings, peak = [], max(reading.peak or 0, reading.allocated)
        left = None if reading.limit is None else float(max(0, reading.limit - peak))
        rise = self._device.add(self._position, reading.allocated)
        # Batches that grow raise the peak more than the floor.
        if rise and rise.now - rise.was >= _OF_PEAK * self._rise_of("peak", rise.steps):
            findings.append(_report(LEAK, reading, rise, left, "allocated memory at the end of a step"))
        splits = reading.inactive_split or 0
        unreserved = None if reading.limit is None else float(max(0, reading.limit - reading.reserved))
        rise = self._splits.add(self._position, splits)
        # A leak leaves unused parts of segments behind as well.
        is_lost = splits > _LOST * reading.reserved
        if rise and is_lost and self._rise_of("allocated", rise.steps) < _LOST * (rise.now - rise.was):
            what = "memory that is reserved but lost between allocated blocks"
            findings.append(_report(FRAGMENTATION, reading, rise, unreserved, what))
        before = None if last is None else last.retries
        self._retried.append(reading.retries is not None and before is not None and reading.retries > before)
        is_level = self._rise_of("peak", _RECENT_READINGS) < _LEVEL * peak
        if sum(self._retried) >= _RETRIED_READINGS and reading.limit and is_level:
            kind = FRAGMENTATION if peak < _FULL * reading.limit else CAPACITY
            findings.append(_report_retries(kind, reading, peak, sum(self._retried), len(self._retried)))
        return findings

    def _rise_of(self, field: str, steps: float) -> float:
        """Return how much a field of the readings has risen in the last so many steps."""
        history = self._history
        first = next((i for i, each in enumerate(history) if each.step >= history[-1].step - steps), 0)
        first = min(first, max(0, len(history) - 2 * _PEAK_READINGS))
        ends = list(islice(history, first, first + _PEAK_READINGS)), list(history)[-_PEAK_READINGS:]
        before, after = (median(getattr(each, field) or 0 for each in readings) for readings in ends)
        return after - before

    def _check_host(self, reading: MemoryReading) -> list[Finding]:
        findings = []
        series = (
            (self._host, reading.host, "host_left", "memory of the training process on the host"),
            (self._workers, reading.workers, "host_left", "memory of its child processes, such as loader workers,"),
            (self._shm, reading.shm, "shm_left", "shared memory (/dev/shm)"),
        )
        for growth, value, field, what in series:
            left = self._left.get(field)
            if value is not None and (rise := growth.add(self._position, value)):
                findings.append(_report(HOST_GROWTH, reading, rise, left, what))
        return findings

    def explain(self, failed: OutOfMemory, step: int) -> Finding:
        """Return the verdict on a failed allocation: a leak if memory has risen up to it, or else what its sizes show."""
        verdict, rise = explain(failed), self._rise_before_failure(failed)
        if verdict.kind == FRAGMENTATION and self._outgrows(failed):
            text = f"{describe_sizes(failed)}: the steps need more and more memory, and unused parts of segments do not last"
            verdict = Explanation(CAPACITY, text, CURES[CAPACITY])
        rest = 0.0 if verdict.kind != FRAGMENTATION else failed.unallocated or 0.0
        evidence: dict[str, Any] = {k: v for k, v in failed._asdict().items() if v is not None}
        if rise is not None and rise.now - rise.was > rest:
            kind = LEAK if failed.where == "device" else HOST_GROWTH
            what = f"allocated memory had risen from {format_bytes(rise.was)} to {format_bytes(rise.now)}"
            text = f"{what} in {rise.steps:.0f} steps, {_per_thousand(rise)}; {describe_sizes(failed)}"
            verdict = Explanation(kind, text, CURES[kind])
            evidence |= _evidence(rise)
        self.reported.add(verdict.kind)
        message = f"out of memory: {verdict.text}; {verdict.cure}".rstrip("; ")
        return _finding(verdict.kind, step, step, message, evidence)

    def _outgrows(self, failed: OutOfMemory) -> bool:
        """Return whether the peak has risen so fast that without fragmentation memory would have run out soon as well."""
        if len(self._history) < 2 * _PEAK_READINGS:
            return False
        unused = failed.free_for_process + (failed.unallocated or 0.0) - (failed.asked or 0.0)
        return self._rise_of("peak", self._position) > max(unused, _OUTGROWN * (failed.limit or 0.0))

    def _rise_before_failure(self, failed: OutOfMemory) -> Rise | None:
        """Return the rise of the floor over the last readings, if it is steady and large enough to matter."""
        on_device = failed.where == "device"
        if failed.where not in ("device", "host"):
            return None
        history = list(self._history)[2 if self._readings <= _HISTORY else 0 :]
        points = [(r.step, value) for r in history if (value := r.allocated if on_device else r.host) is not None]
        size = -(-len(points) // _MAX_FLOORS) if points else 1
        blocks = [points[i : i + size] for i in range(0, len(points), size)]
        floors = [(float(block[-1][0]), float(min(value for _, value in block))) for block in blocks]
        limit = failed.limit or next((float(r.limit) for r in reversed(history) if r.limit), None)
        if len(points) < _MIN_READINGS or (on_device and limit is None):
            return None
        steps = [b[1] - a[1] for a, b in pairwise(floors)]
        total = floors[-1][1] - floors[0][1]
        smallest = _OF_LIMIT * limit if on_device and limit else max(256.0 * _MB, 0.25 * floors[0][1])
        is_steady = sum(step > 0 for step in steps) >= _RISING * len(steps) and max(steps) < 0.6 * total
        peaks = [r.peak for r in history if r.peak is not None] if on_device else []
        if total < smallest or not is_steady or (peaks and total < _OF_PEAK * (max(peaks[-size:]) - max(peaks[:size]))):
            return None
        return Rise(theil_sen(floors), floors[0][1], floors[-1][1], floors[-1][0] - points[0][0])


def _per_thousand(rise: Rise) -> str:
    return f"{rise.slope * 1000 / 1e6:.1f} MB per 1,000 steps"


def _evidence(rise: Rise) -> dict[str, Any]:
    return {"mb_per_1000_steps": round(rise.slope / 1e3, 3), "was": rise.was, "now": rise.now, "steps": rise.steps}


def _report(kind: str, reading: MemoryReading, rise: Rise, left: float | None, what: str) -> Finding:
    end = None if left is None or rise.slope <= 0 else reading.step + int(left / rise.slope)
    out = "" if end is None else f"; at this rate it runs out at about step {end}"
    grown = f"{what} rises by {_per_thousand(rise)}, from {format_bytes(rise.was)} to {format_bytes(rise.now)}"
    evidence = {**_evidence(rise), "runs_out_at": end, **reading.row()}
    onset = max(1, reading.step - int(rise.steps))
    cure = CURES[kind] if kind == FRAGMENTATION else f"{CURES[kind]}. {_NO_LEAK}"
    return _finding(kind, reading.step, onset, f"{grown} since step {onset}{out}. {cure}", evidence)


def _report_retries(kind: str, reading: MemoryReading, peak: int, retried: int, of: int) -> Finding:
    assert reading.limit is not None and reading.reserved is not None
    message = (
        f"in {retried} of the last {of} readings the allocator had to return its cached memory and try again: "
        f"{format_bytes(peak)} allocated at most, {format_bytes(reading.reserved)} reserved, of "
        f"{format_bytes(reading.limit)}. Steps wait for that, and the next one may run out. {CURES[kind]}"
    )
    return _finding(kind, reading.step, reading.step, message, {"retried": retried, "readings": of, **reading.row()})


def _finding(kind: str, step: int, onset: int, message: str, evidence: dict[str, Any]) -> Finding:
    return Finding(
        kind=kind, severity=Severity.NOTE, step=step, onset=onset, detector="memory", message=message, evidence=evidence
    )
