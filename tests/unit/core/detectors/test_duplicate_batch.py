"""Batches that were seen a short while ago."""

from __future__ import annotations

from random import Random

import pytest
from feeding import signal, watch_field

from holdfast.core.base.config import DetectSection
from holdfast.core.base.types import Kind, Severity
from holdfast.core.detectors import DuplicateBatch


def watch_batches(batches, **more):
    return watch_field(DuplicateBatch(DetectSection()), "batch", batches, **more)


def test_batches_that_never_repeat_are_left_alone():
    assert watch_batches(range(5000)) == []


@pytest.mark.parametrize("distance", [1, 3, 200, 512])
def test_loader_that_repeats_itself_is_noted_at_the_third_repeat_and_once(distance):
    batches = [*range(1000), *range(1000 - distance, 1000), *range(2000, 2100)]
    found = watch_batches(batches)
    if distance < 3:
        assert found == []
        return
    (found,) = found
    assert (found.kind, found.severity, found.step, found.onset) == (
        Kind.DUPLICATE_BATCH,
        Severity.NOTE,
        1003,
        1003 - distance,
    )
    assert found.evidence == {"distance": distance, "repeats": 3, "batch": 1000 - distance + 2}


def test_one_repeat_or_two_are_chance():
    assert watch_batches([*range(100), 5, *range(100, 200), 150, *range(200, 300)]) == []


def test_same_batch_at_every_step_is_noted_once():
    found = watch_batches([7] * 1000)
    assert [f.evidence["distance"] for f in found] == [1]


def test_data_so_small_that_an_epoch_is_remembered_is_noted_once():
    found = watch_batches([n % 100 for n in range(2000)])
    assert [f.evidence["distance"] for f in found] == [100]


def test_small_data_whose_batches_are_shuffled_whole_are_not_noted_again_and_again():
    order, random = list(range(100)), Random(0)
    batches = []
    for _ in range(20):
        random.shuffle(order)
        batches += order
    assert len(watch_batches(batches)) <= 5


def test_batch_from_longer_ago_than_is_remembered_is_new():
    assert watch_batches([n % 513 for n in range(5000)]) == []


def test_another_attempt_at_a_step_is_no_repeat():
    detector = DuplicateBatch(DetectSection())
    for step in range(1, 50):
        for attempt in (1, 2, 3):
            assert detector.observe(signal(step, batch=step, attempt=attempt)) is None


def test_declared_shift_forgets_the_batches():
    detector = DuplicateBatch(DetectSection())
    watch_field(detector, "batch", range(100))
    detector.rebaseline()
    assert watch_field(detector, "batch", range(100), first=101) == []


def test_step_without_a_fingerprint_is_passed_over():
    assert watch_batches([None] * 100) == []
