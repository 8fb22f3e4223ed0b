"""The bars that the shipped detectors must meet, checked on measured scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from benchmarks.detectors.contenders import OURS, Contender
from benchmarks.detectors.scoring import Score

SPIKES = ("spike_small", "spike_large", "spike_steep", "spike_burst", "spike_persistent")
DIVERGENCES = ("divergence_fast", "divergence_slow")
APART = ("level_shift_up",)
"""scored and shown, but in no bar: it cannot be distinguished from new data"""


class Bar(NamedTuple):
    """One bar: the requirement, the measured value, and whether it is met."""

    what: str
    measured: str
    met: bool


def bars(score: Score) -> list[Bar]:
    """This project's detectors against their bars. A spike is found by any alarm, a divergence by a costly one."""
    false = score.false(costly=True)
    spikes, early = score.recall(SPIKES), score.recall(["spike_early"])
    fast, slow = (score.recall([kind], costly=True) for kind in DIVERGENCES)
    return [
        Bar(
            "false costly alarms per 10,000 clean steps, upper end <= 0.1",
            f"{false.value:.3f} [{false.interval[0]:.3f}, {false.interval[1]:.3f}] ({false.count} in {false.steps:,})",
            false.interval[1] <= 0.1,
        ),
        Bar("spike recall >= 0.99", f"{spikes.share:.4f} of {spikes.events}", spikes.share >= 0.99),
        Bar("spike latency, median <= 2", f"{spikes.median:g} (p95 {spikes.p95:g})", spikes.median <= 2),
        Bar("spike_early recall >= 0.85", f"{early.share:.3f} of {early.events}", early.share >= 0.85),
        Bar("divergence_fast within 80 steps, all", f"{fast.within(80):.4f} of {fast.events}", fast.within(80) == 1.0),
        Bar("divergence_slow recall >= 0.98", f"{slow.share:.3f} of {slow.events}", slow.share >= 0.98),
    ]


class Point(NamedTuple):
    """A detector at one threshold, in the plane of the plot."""

    false: float
    recall: float


def point(score: Score, kinds: tuple[str, ...], costly: bool = False) -> Point:
    """Costly only, or all alarms alike: false alarms and recall are always of the same sort."""
    return Point(score.false(True if costly else None).value, score.recall(kinds, costly).share)


def ahead(ours: Mapping[Contender, Score], others: Mapping[Contender, Score]) -> Iterator[str]:
    """Each rule, at any threshold of its sweep, that beats this project's default on false alarms and recall both.

    All alarms are compared with all alarms. A rule whose alarm is costly must also not beat the costly ones alone, on
    divergences, which are what costly alarms are for.
    """
    own = ours[Contender(OURS)] if Contender(OURS) in ours else ours[Contender(OURS, 1.0)]
    for contender, score in others.items():
        for group, kinds, costly in (("spikes", SPIKES, False), ("divergences", DIVERGENCES, True)):
            if costly and not score.costly_alarms:
                continue
            mine, theirs = point(own, kinds, costly), point(score, kinds, costly)
            if theirs.false < mine.false and theirs.recall > mine.recall:
                yield (
                    f"{contender.name} at {contender.threshold}: {group} {theirs.recall:.3f} at {theirs.false:.2f} false "
                    f"alarms per 10,000, against {mine.recall:.3f} at {mine.false:.2f}"
                )
