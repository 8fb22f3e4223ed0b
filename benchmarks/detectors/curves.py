"""Generated curves, by kind and seed, and which seeds are for what.

Detectors are tuned on the tuning seeds and on nothing else. The test seeds are frozen: a detector changed after a look
at its result on them has been tuned on them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np

from benchmarks.detectors import anomalies, clean
from benchmarks.detectors.healthy_run import STEPS, Curve, Event

__all__ = ["ANOMALY", "CLEAN", "SEEDS", "STEPS", "Curve", "Event", "make", "seeds"]

CLEAN = tuple(clean.MAKERS)
ANOMALY = tuple(anomalies.MAKERS)

SEEDS = {
    "tuning": {"clean": range(8), "anomaly": range(100), "loop": range(3)},
    "test": {"clean": range(10_000, 10_010), "anomaly": range(10_000, 10_200), "loop": range(10_000, 10_003)},
}
"""tuning seeds are under 100, test seeds 10,000 and up; `--quick` takes the first few of either"""


def make(kind: str, seed: int) -> Curve:
    """The same curve for the same kind and seed, on any machine with the same numpy."""
    maker = clean.MAKERS.get(kind) or anomalies.MAKERS.get(kind)
    if maker is None:
        raise ValueError(f"no kind {kind!r}; known are {', '.join((*CLEAN, *ANOMALY))}")
    return maker(kind, seed, np.random.default_rng([zlib.crc32(kind.encode()), seed]))


def seeds(which: str, kind: str, quick: bool = False) -> range:
    """The seeds of a kind. `quick`: a tenth of them, for a look and not for a claim."""
    whole = SEEDS[which]["clean" if kind in CLEAN else "anomaly"]
    return range(whole.start, whole.start + max(2, len(whole) // 10)) if quick else whole


def every(which: str, quick: bool = False, kinds: tuple[str, ...] = CLEAN + ANOMALY) -> Iterator[Curve]:
    for kind in kinds:
        for seed in seeds(which, kind, quick):
            yield make(kind, seed)
