"""What detection costs: online per step, against appending to a deque in the same run; offline over a million points."""

from __future__ import annotations

import inspect
import time
from collections import deque
from statistics import median
from typing import Any

import numpy as np

from benchmarks.detectors.alarms import Holdfast, signals
from benchmarks.detectors.contenders import OURS
from benchmarks.detectors.course import Curve, course
from holdfast.core import detectors as ours
from holdfast.core.config import Detect
from holdfast.core.detectors import build

STRETCH = 500
"""steps timed at a time, detectors and deque in turn, so that both meet the same machine"""


def rows(quick: bool) -> tuple[dict[str, dict[str, str]], dict[str, Any]]:
    online, append = per_step(20 if quick else 80)
    points = 100_000 if quick else 1_000_000
    how, seconds = offline(points)
    data = {"us_per_step": online, "us_per_append": append, "points": points, "seconds": seconds, "offline": how}
    return {
        "cost: us a step, all detectors": {OURS: f"{online:.1f}"},
        "cost: us a deque append": {OURS: f"{append:.3f}"},
        f"cost: s for {points:,} points ({how})": {OURS: f"{seconds:.1f}"},
    }, data


def per_step(stretches: int) -> tuple[float, float]:
    """Microseconds a step for `limits` and `observe` of every detector, and for a deque's append; medians of stretches."""
    curve = _long(stretches * STRETCH)
    stream = signals(curve)
    detectors, recent = build(Detect()), deque[float](maxlen=1000)
    judged, appended = [], []
    for at in range(0, len(stream), STRETCH):
        part = stream[at : at + STRETCH]
        began = time.perf_counter()
        for signal in part:
            for detector in detectors:
                detector.limits()
            for detector in detectors:
                detector.observe(signal)
        middle = time.perf_counter()
        for signal in part:
            recent.append(signal.loss)
        judged.append(middle - began)
        appended.append(time.perf_counter() - middle)
    scale = 1e6 / STRETCH
    return median(judged) * scale, median(appended) * scale


def offline(points: int) -> tuple[str, float]:
    """How, and seconds for, a log of that many points: through `scan` where there is one, else step by step."""
    curve = _long(points)
    scan = getattr(ours, "scan", None)
    if scan is not None and len(inspect.signature(scan).parameters) >= 1:
        table = _table(curve)
        began = time.perf_counter()
        list(scan(table) or ())
        return "scan", time.perf_counter() - began
    began = time.perf_counter()
    Holdfast().run(curve)
    return "step by step", time.perf_counter() - began


def _long(steps: int) -> Curve:
    return course(np.random.default_rng(0), steps).curve("cost", 0)


def _table(curve: Curve) -> Any:
    from holdfast.diagnosis.table import Table

    columns = {"loss": curve.loss, "grad_norm": curve.grad_norm, "lr": curve.lr}
    present = {name: np.ones(len(curve), bool) for name in columns}
    return Table("generated", "array", np.arange(len(curve), dtype=float), columns, present)
