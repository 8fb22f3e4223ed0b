"""Leak, fragmentation, capacity and growth on the host are distinguished, and a healthy run is never named."""

from __future__ import annotations

import random

import memory_programs as programs
import pytest
from caching_allocator import MB, CachingAllocator, OutOfMemoryError

from holdfast.core.base.types import Kind, Severity
from holdfast.core.detectors.memory import MemoryDetector, MemoryReading
from holdfast.core.detectors.out_of_memory import OutOfMemory

GB = 1 << 30
TRUTHS = [
    *((program, Kind.MEMORY_LEAK) for program in programs.LEAKS),
    *((program, Kind.FRAGMENTATION) for program in programs.FRAGMENTATIONS),
    *((program, Kind.MEMORY_CAPACITY) for program in programs.CAPACITIES),
]


@pytest.mark.slow
@pytest.mark.parametrize(("program", "kind"), TRUTHS, ids=[program.__name__ for program, _ in TRUTHS])
def test_program_is_named_for_what_it_does(program, kind):
    found = programs.run(program)
    assert found is not None and found.kind == kind, found
    assert found.severity == Severity.NOTE


@pytest.mark.parametrize("program", [p for p, kind in TRUTHS if kind == Kind.MEMORY_LEAK], ids=lambda p: p.__name__)
def test_leak_is_named_too_on_a_larger_device_that_is_read_every_fourth_step(program):
    found = programs.run(program, limit=10 * GB, steps=8000, every=4)
    assert found is not None and found.kind == Kind.MEMORY_LEAK, found


@pytest.mark.slow
@pytest.mark.parametrize("program", programs.HEALTHY, ids=lambda p: p.__name__)
def test_healthy_program_is_not_named(program):
    assert programs.run(program, steps=3000) is None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_healthy_run_of_100_000_steps_with_noisy_memory_is_never_named(seed):
    detector = MemoryDetector()
    assert [found for reading in programs.healthy_readings(seed) for found in detector.observe(reading)] == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20, 26))
def test_healthy_run_read_at_every_step_is_never_named(seed):
    detector = MemoryDetector()
    readings = programs.healthy_readings(seed, interval=1)
    assert [found for reading in readings for found in detector.observe(reading)] == []


@pytest.mark.slow
def test_leak_has_its_slope_and_the_step_at_which_memory_runs_out():
    found = programs.run(programs.leak_that_begins_late)
    assert found is not None
    assert found.evidence["mb_per_1000_steps"] == pytest.approx(1048.6, rel=0.01)
    assert found.onset == pytest.approx(1500, abs=50)

    def leaks_to_the_end(allocator):
        yield from programs.leak_that_begins_late(allocator)

    allocator, last = CachingAllocator(4 * GB), 0
    with pytest.raises(OutOfMemoryError):
        for last, _ in enumerate(leaks_to_the_end(allocator), 1):  # noqa: B007
            pass
    assert found.evidence["runs_out_at"] == pytest.approx(last, rel=0.1)


def test_each_kind_is_reported_once():
    detector, found = MemoryDetector(), []
    for step in range(1, 3000):
        found += detector.observe(MemoryReading(step, 2 * GB + step * MB, 8 * GB, 7 * GB + step * MB, 0, 0, 0, 20 * GB))
    assert [each.kind for each in found] == [Kind.MEMORY_LEAK]


def test_growth_of_the_host_names_the_process_or_its_children():
    for field, words in (("host", "training process"), ("workers", "child processes"), ("shm", "/dev/shm")):
        detector, found, noise = MemoryDetector(), [], random.Random(1)
        for step in range(1, 1500):
            size = int(GB + step * 0.4 * MB + noise.random() * 10 * MB)
            found += detector.observe(MemoryReading(step, host_left=8 * GB, shm_left=8 * GB, **{field: size}))
        assert [each.kind for each in found] == [Kind.HOST_GROWTH]
        assert words in found[0].message and found[0].evidence["mb_per_1000_steps"] == pytest.approx(419, rel=0.05)


@pytest.mark.slow
def test_growth_that_slows_down_is_not_named():
    for rate in (50, 300, 1500):
        detector, found = MemoryDetector(), []
        for step in range(1, 20_000):
            filled = int(GB + 0.5 * GB * (1 - 2.718 ** (-step / rate)))
            found += detector.observe(MemoryReading(step, filled, 4 * GB, 3 * GB, 0, 0, 0, 20 * GB, filled, 8 * GB))
        assert found == [], rate


def test_memory_after_rollbacks_goes_on():
    detector, found, step = MemoryDetector(), [], 0
    for count in range(1, 2000):
        step = step - 40 if count % 100 == 0 else step + 1
        found += detector.observe(
            MemoryReading(step, 2 * GB + count * MB, 8 * GB, 7 * GB + count * MB, 0, 0, 0, 20 * GB)
        )
    assert [each.kind for each in found] == [Kind.MEMORY_LEAK]


def test_readings_without_anything_find_nothing():
    detector = MemoryDetector()
    assert [found for step in range(1, 500) for found in detector.observe(MemoryReading(step))] == []
    assert detector.explain(OutOfMemory("device"), 500).kind == Kind.OUT_OF_MEMORY
    assert detector.explain(OutOfMemory("host"), 500).kind == Kind.MEMORY_CAPACITY


def test_a_full_host_after_steady_growth_is_growth():
    detector = MemoryDetector()
    for step in range(1, 40):
        detector.observe(MemoryReading(step, host=GB + step * 100 * MB, host_left=4 * GB))
    assert detector.explain(OutOfMemory("host", asked=1e9), 40).kind == Kind.HOST_GROWTH


def test_rows_have_sizes_in_gb_and_only_what_was_read():
    assert MemoryReading(3, host=1_500_000_000).row() == {"memory_host": 1.5}
    row = MemoryReading(3, 10**9, 2 * 10**9, 3 * 10**9, 0, 4, 5, 9, workers=0).row()
    assert row["memory_retries"] == 4 and row["memory_ooms"] == 5 and row["memory_workers"] == 0.0
    assert row["memory_peak"] == 3.0 and "memory_limit" not in row
