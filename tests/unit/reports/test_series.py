"""Packed curves: short ones exact, long ones with every extreme exact, unpacked here as the page does."""

from __future__ import annotations

import base64
import zlib

import numpy as np
import pytest

from holdfast.diagnosis.model.table import Series
from holdfast.reports.plots import thin
from holdfast.reports.series import BUCKET, CODES, MAX_EXACT, pack_series


def array(text: str, dtype: str) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype)


def unpack(packed: dict) -> tuple[np.ndarray, np.ndarray]:
    x, y = packed["x"], packed["y"]
    if "raw" in x:
        steps = array(x["raw"], "<f8")
    else:
        steps = np.concatenate([start + np.arange(n) * distance for start, distance, n in x["runs"]] or [np.empty(0)])
    if "f4" in y:
        return steps, array(y["f4"], "<f4")
    codes, low, high = array(y["codes"], "u1"), array(y["low"], "<f4"), array(y["high"], "<f4")
    bucket = np.arange(packed["n"]) // y["bucket"]
    values = low[bucket] + (high[bucket] - low[bucket]) * (codes / np.float32(CODES - 1))
    values[codes == CODES - 1] = high[bucket][codes == CODES - 1]
    for code, value in ((CODES, np.nan), (CODES + 1, np.inf), (CODES + 2, -np.inf)):
        values[codes == code] = value
    return steps, values


@pytest.mark.parametrize(
    "steps",
    [
        [],
        [5.0],
        [1.0, 2.0, 3.0],
        [0.0, 100.0, 200.0, 201.0, 202.0],
        [1.0, 2.0, 4.0, 8.0, 16.0],
        list(np.cumsum(np.arange(300) % 7 + 1.0)),
    ],
)
def test_steps_come_back_exactly(steps):
    steps = np.array(steps)
    back, values = unpack(pack_series(steps, steps * 0.5))
    assert back.tolist() == steps.tolist()
    assert values.tolist() == (steps * 0.5).astype(np.float32).tolist()


def test_steps_that_go_back_are_sorted_with_their_values():
    back, values = unpack(pack_series(np.array([1.0, 2.0, 3.0, 2.0]), np.array([10.0, 20.0, 30.0, 25.0])))
    assert (back.tolist(), values.tolist()) == ([1.0, 2.0, 2.0, 3.0], [10.0, 20.0, 25.0, 30.0])


def test_long_curve_keeps_every_extreme_exactly_and_every_point_nearly():
    rng = np.random.default_rng(0)
    n = MAX_EXACT + 77
    values = rng.normal(2.0, 0.1, n)
    values[70_003], values[5], values[6], values[n - 1], values[640 : 640 + BUCKET] = 1e6, np.nan, np.inf, -np.inf, 7.0
    _, back = unpack(pack_series(np.arange(n, dtype=float), values))
    exact = values.astype(np.float32)
    finite = np.isfinite(exact)
    assert np.array_equal(np.isnan(back), np.isnan(exact)) and back[6] == np.inf and back[-1] == -np.inf
    assert back[70_003] == np.float32(1e6) and (back == np.float32(1e6)).sum() == 1
    for start in range(0, n, BUCKET):
        piece = slice(start, start + BUCKET)
        inside = finite[piece]
        assert back[piece][inside].min() == exact[piece][inside].min()
        assert back[piece][inside].max() == exact[piece][inside].max()
        span = float(exact[piece][inside].max() - exact[piece][inside].min())
        assert np.abs(back[piece][inside] - exact[piece][inside]).max() <= span / (CODES - 1) * 1.01


def test_value_beyond_32_bits_stays_finite():
    _, values = unpack(pack_series(np.array([1.0, 2.0]), np.array([1e300, -1e300])))
    assert np.isfinite(values).all()


def test_thinning_keeps_spikes_and_nonfinite_values():
    values = np.random.default_rng(1).normal(0.0, 1.0, 500_000)
    values[123_456], values[400_001], values[9] = 50.0, -60.0, np.nan
    thinned = thin(Series(np.arange(500_000.0), values), 5_000)
    assert len(thinned.step) <= 5_000
    assert {123_456.0, 400_001.0, 9.0, 0.0, 499_999.0} <= set(thinned.step.tolist())
