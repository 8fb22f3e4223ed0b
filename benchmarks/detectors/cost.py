"""The cost of detection: per step, compared with appending to a deque in the same run, and over a million points."""

from __future__ import annotations

import time
from collections import deque
from statistics import median
from typing import Any

import numpy as np

from benchmarks.detectors.alarms import signals
from benchmarks.detectors.contenders import OURS
from benchmarks.detectors.healthy_run import Curve, healthy_run
from holdfast.core.base.config import DetectSection
from holdfast.core.detectors import build
from holdfast.core.detectors.scan import scan
from holdfast.diagnosis.find.losses import Losses
from holdfast.diagnosis.model.table import Table

STRETCH = 500
"""steps timed at a time, alternating between detectors and deque, so that both see the same machine load"""


def rows(quick: bool) -> tuple[dict[str, dict[str, str]], dict[str, Any]]:
    online, append = per_step(20 if quick else 80)
    points = 100_000 if quick else 1_000_000
    scanned, looked = offline(points)
    data = {
        "us_per_step": online,
        "us_per_append": append,
        "points": points,
        "seconds_scan": scanned,
        "seconds_diagnosis": looked,
    }
    return {
        "cost: us a step, all detectors": {OURS: f"{online:.1f}"},
        "cost: us a deque append": {OURS: f"{append:.3f}"},
        f"cost: s for {points:,} points, each looked at": {OURS: f"{scanned:.1f}"},
        f"cost: s for {points:,} points, as a diagnosis does": {OURS: f"{looked:.1f}"},
    }, data


def per_step(stretches: int) -> tuple[float, float]:
    """Return median microseconds per step for `limits` and `observe` of every detector, and for a deque append."""
    curve = _long(stretches * STRETCH)
    stream = signals(curve)
    detectors, recent = build(DetectSection()), deque[float](maxlen=1000)
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


def offline(points: int) -> tuple[float, float]:
    """Return seconds for a log of that many points: every detector at every point, and as a diagnosis reads it."""
    table = _table(_long(points))
    began = time.perf_counter()
    scan(table)
    middle = time.perf_counter()
    Losses(table)
    return middle - began, time.perf_counter() - middle


def _long(steps: int) -> Curve:
    return healthy_run(np.random.default_rng(0), steps).curve("cost", 0)


def _table(curve: Curve) -> Table:
    columns = {"loss": curve.loss, "grad_norm": curve.grad_norm, "lr": curve.lr}
    present = {name: np.ones(len(curve), bool) for name in columns}
    return Table("generated", "array", np.arange(len(curve), dtype=float), columns, present)
