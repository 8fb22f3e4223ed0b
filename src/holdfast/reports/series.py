"""Packs the points of a curve for a page, so that a million steps stay small and no extreme is lost.

Up to `MAX_EXACT` points the values are floats of 32 bits. Longer curves are packed in buckets of `BUCKET` points: the
minimum and the maximum of a bucket are exact, and each point in between is one of `CODES` values from one to the other.
So the extremes of any stretch of whole buckets are exact, and a point is off by at most 0.2% of the range of its bucket.
Three more codes stand for NaN, Inf and -Inf. Steps that rise evenly are one run each. The page unpacks all of it.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_EXACT = 100_000
BUCKET = 64
CODES = 253
_NAN, _INF, _MINUS_INF = 253, 254, 255
_MAX_FLOAT32 = float(np.finfo(np.float32).max)

Array = NDArray[np.float64]


def pack_series(steps: Array, values: Array) -> dict[str, Any]:
    """Return the points of a curve as JSON, by their steps: `n`, `x` and `y`."""
    if len(steps) > 1 and (np.diff(steps) < 0).any():  # a log whose run went back
        order = np.argsort(steps, kind="stable")
        steps, values = steps[order], values[order]
    return {"n": len(steps), "x": _pack_steps(steps), "y": _pack_values(values)}


def _pack_steps(steps: Array) -> dict[str, Any]:
    """Return runs of evenly spaced steps as [start, distance, count], or all steps if they have no such runs."""
    if not len(steps):
        return {"runs": []}
    distances = np.diff(steps)
    breaks = np.flatnonzero(distances[1:] != distances[:-1]) + 2 if len(steps) > 2 else np.empty(0, int)
    runs, start = [], 0
    for stop in [*breaks.tolist(), len(steps)]:
        if stop <= start:  # a break right after a break begins a run of its own
            continue
        distance = float(distances[start]) if stop - start > 1 else 0.0
        runs.append([float(steps[start]), distance, stop - start])
        start = stop
        if len(runs) * 8 > len(steps) + 64:
            return {"raw": _compress(steps.astype("<f8"))}
    return {"runs": runs}


def _pack_values(values: Array) -> dict[str, Any]:
    with np.errstate(all="ignore"):
        finite = np.isfinite(values)
        # A finite value beyond the range of a 32-bit float must not become infinite.
        narrow = np.where(finite, np.clip(values, -_MAX_FLOAT32, _MAX_FLOAT32), values).astype("<f4")
        return {"f4": _compress(narrow)} if len(values) <= MAX_EXACT else _quantize(narrow)


def _quantize(values: NDArray[np.float32]) -> dict[str, Any]:
    """Return the extremes of each bucket, and for each value its place between them."""
    padding = -len(values) % BUCKET
    padded = np.concatenate([values, np.repeat(values[-1:], padding)]).reshape(-1, BUCKET)
    finite = np.isfinite(padded)
    low = np.where(finite, padded, np.inf).min(axis=1)
    high = np.where(finite, padded, -np.inf).max(axis=1)
    is_empty = ~finite.any(axis=1)
    low[is_empty], high[is_empty] = 0.0, 0.0
    span = np.where(high > low, high.astype(float) - low, 1.0)
    place = np.rint((padded - low[:, None].astype(float)) / span[:, None] * (CODES - 1))
    codes = np.where(finite, np.clip(place, 0, CODES - 1), 0).astype(np.uint8)
    # Only the extreme itself may have its code: the page shows that code as the exact value.
    inner = finite & (high > low)[:, None]
    codes[inner & (codes == CODES - 1) & (padded < high[:, None])] = CODES - 2
    codes[inner & (codes == 0) & (padded > low[:, None])] = 1
    codes[np.isnan(padded)], codes[padded == np.inf], codes[padded == -np.inf] = _NAN, _INF, _MINUS_INF
    packed = {"codes": _compress(codes.reshape(-1)[: len(values)])}
    return {**packed, "low": _compress(low.astype("<f4")), "high": _compress(high.astype("<f4")), "bucket": BUCKET}


def _compress(array: NDArray[Any]) -> str:
    """Return the bytes of an array, deflated and in base64."""
    return base64.b64encode(zlib.compress(array.tobytes(), 6)).decode()
