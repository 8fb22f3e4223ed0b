"""Step times of healthy ranks: seconds between steps, in the loader, computing, and waiting, as they were measured.

Two ranks with DistributedDataParallel on gloo trained 4,000 steps on 2 cores that other programs kept busy (load 8 to 14;
torch 2.13, Python 3.11, 2026-11-18). Each profile has, for every phase, the median in ms and the quantiles of the times over
their median. Neighbouring steps correlate: the normal score of a time is a sum of white noise and of two processes, with a
memory of 3 and of 33 steps. The shares of these two are in the profile. The slow one is common to the ranks: it is the load
of the machine, and the measured correlation of the two ranks (0.3 to 0.5) is about its share.

QUIET_HOST: the forward mostly sleeps, as a host does that waits for its device. BUSY_HOST: the ranks compute on the busy
cores.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
_SHARES = (0.0003, 0.003, 0.01, 0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.997, 0.9997)
_SCORES = [NormalDist().inv_cdf(share) for share in _SHARES]
_WAIT_SECONDS = 0.01


class Profile(NamedTuple):
    """The noise of one kind of program."""

    medians: tuple[float, float, float]
    quantiles: tuple[tuple[float, ...], ...]
    fast: float
    slow: float
    is_slow_common: bool = True


QUIET_HOST = Profile(
    (1.78, 0.6, 31.9),
    (
        (0.756, 0.779, 0.796, 0.83, 0.904, 1.0, 1.453, 3.555, 6.197, 13.716, 20.028, 37.018),
        (0.689, 0.724, 0.753, 0.828, 0.916, 1.0, 1.197, 3.387, 8.241, 24.821, 39.201, 95.888),
        (0.984, 0.986, 0.986, 0.988, 0.993, 1.0, 1.033, 1.151, 1.273, 1.768, 2.377, 4.064),
    ),
    0.12,
    0.17,
)
BUSY_HOST = Profile(
    (9.0, 0.76, 19.0),
    (
        (0.454, 0.476, 0.488, 0.513, 0.573, 1.0, 1.963, 3.448, 4.564, 8.31, 12.838, 25.151),
        (0.716, 0.765, 0.797, 0.845, 0.926, 1.0, 1.266, 8.796, 15.848, 32.951, 54.68, 128.923),
        (0.323, 0.332, 0.339, 0.359, 0.555, 1.0, 1.755, 2.767, 3.626, 6.925, 10.918, 20.306),
    ),
    0.15,
    0.4,
)


def own_times(profile: Profile, steps: int, ranks: int, seed: int) -> Values:
    """Return the seconds of the three phases that a rank spends by itself, as (steps, phases, ranks)."""
    rng = np.random.default_rng(seed)
    scores = np.sqrt(1 - profile.fast - profile.slow) * rng.standard_normal((steps, 3, ranks))
    scores += np.sqrt(profile.fast) * _correlated(rng, 0.7, steps, 3, ranks)
    scores += np.sqrt(profile.slow) * _correlated(rng, 0.97, steps, 3, 1 if profile.is_slow_common else ranks)
    times = np.empty_like(scores)
    for phase, (median, quantiles) in enumerate(zip(profile.medians, profile.quantiles, strict=True)):
        times[:, phase] = 1e-3 * median * np.exp(np.interp(scores[:, phase], _SCORES, np.log(quantiles)))
    return times


def with_wait(own: Values) -> Values:
    """Add the wait for the slowest rank, which the backward of DistributedDataParallel makes of every rank."""
    total = own.sum(axis=1)
    with np.errstate(invalid="ignore"):
        wait = total.max(axis=1, keepdims=True) - total + _WAIT_SECONDS
    return np.concatenate((own, wait[:, None]), axis=1)


def _correlated(rng: np.random.Generator, memory: float, steps: int, *shape: int) -> Values:
    noise = np.sqrt(1 - memory**2) * rng.standard_normal((steps, *shape))
    noise[0] /= np.sqrt(1 - memory**2)
    for step in range(1, steps):
        noise[step] += memory * noise[step - 1]
    return noise
