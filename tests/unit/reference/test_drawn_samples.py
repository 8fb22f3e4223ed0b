"""Samples per source, computed from ranges, equal a count sample by sample."""

from __future__ import annotations

import random

import numpy as np
import pytest

from holdfast.reference.mixture import BLOCK, DrawnSamples, Mixture, MixtureStage, block_quotas
from holdfast.reference.tokens import Tokens


def mixture() -> Mixture:
    sources = [Tokens(name, np.zeros(5000, dtype=np.uint8), 256, "bytes") for name in ("a", "b", "c")]
    stages = [MixtureStage(0, block_quotas((0.5, 0.3, 0.2))), MixtureStage(2, block_quotas((0.1, 0.0, 0.9)))]
    return Mixture(sources, 8, 100_000, 3, stages, 0.1)


@pytest.mark.parametrize("stop", [0, 1, 17, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 123])
def test_count_per_source_equals_counting_samples(stop):
    mixed = mixture()
    places = [mixed.locate(n)[0] for n in range(stop)]
    assert mixed.count_per_source(stop) == [places.count(source) for source in range(3)]


@pytest.mark.parametrize("seed", range(5))
def test_skips_rollbacks_and_gaps_are_counted_correctly(seed):
    """Compare with a dictionary of every committed step, over random commits, skips and rollbacks."""
    draw, mixed = random.Random(seed), mixture()
    drawn, kept, step, at = DrawnSamples(), {}, 0, 0
    for _ in range(300):
        if draw.random() < 0.1:
            at += 4 * draw.randint(1, 5)  # a batch skipped, or a window left out
        if draw.random() < 0.05 and step:
            step -= draw.randint(1, min(step, 20))  # a rollback; the data position is not rolled back
            kept = {n: spans for n, spans in kept.items() if n <= step}
        step += 1
        spans = [(at, at + 4), (at + 4, at + 8)] if draw.random() < 0.9 else [(at, at + 4), (at + 8, at + 12)]
        joined = [(at, at + 8)] if spans[0][1] == spans[1][0] else spans
        kept[step] = joined
        at = spans[-1][1]
        drawn.commit(step, joined)
    places = [mixed.locate(n)[0] for spans in kept.values() for start, stop in spans for n in range(start, stop)]
    assert drawn.count_per_source(mixed) == [places.count(source) for source in range(3)]


def test_resumed_run_counts_samples_from_before_the_restart():
    mixed, drawn = mixture(), DrawnSamples()
    for step in range(11, 21):
        drawn.commit(step, [(8 * (step - 1), 8 * step)])
    assert drawn.count_per_source(mixed) == mixed.count_per_source(160)


def test_long_run_is_stored_as_one_range():
    drawn = DrawnSamples()
    for step in range(1, 5001):
        drawn.commit(step, [(8 * (step - 1), 8 * step)])
    assert len(drawn._ranges) == 1
