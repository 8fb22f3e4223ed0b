"""Staging on the device: as many bytes as were late, within the limits, and bit for bit."""

from __future__ import annotations

import pytest
import torch
from test_snapshot_buffers import bits, buffer_of, tensors

from holdfast.runtime.snapshots import device_staging as module
from holdfast.runtime.snapshots import layout as layout_module
from holdfast.runtime.snapshots.device_staging import LATE_COPIES, MARGIN, TOLERATED_MS, DeviceStaging
from holdfast.runtime.snapshots.layout import SnapshotLayout

HOST = torch.device("cpu")
MEGABYTE = 1 << 20


class FakeEvent:
    """A CUDA event. The test passes a time in milliseconds in place of a stream."""

    def __init__(self) -> None:
        self.at: float | None = None

    def record(self, at: float) -> None:
        self.at = at

    def query(self) -> bool:
        return self.at is not None

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.at is not None and other.at is not None
        return other.at - self.at


@pytest.fixture(autouse=True)
def device(monkeypatch):
    free = {"bytes": 1 << 40}
    monkeypatch.setattr(module, "_event", FakeEvent)
    monkeypatch.setattr(module, "free_device_bytes", lambda device: free["bytes"])
    return free


def megabyte_tensors(count: int = 64) -> dict[str, torch.Tensor]:
    return {f"t{i}": torch.full((MEGABYTE // 4,), float(i)) for i in range(count)}


def copy_once(staging: DeviceStaging, *, took: float, left: float, megabytes: int = 64) -> None:
    """Make one copy that takes `took` ms without staging; the next update is ready after `left` ms."""
    times = staging.begin_copy(0.0)
    times.read_begun.record(0.0)
    times.read_ended.record(took * (1 - staging.nbytes / (megabytes * MEGABYTE)))
    times.record_update(left)


def test_nothing_is_staged_if_updates_do_not_wait():
    staging = DeviceStaging(SnapshotLayout(megabyte_tensors(), HOST, crosses_bus=True), HOST)
    for _ in range(10):
        copy_once(staging, took=10.0, left=20.0)
        copy_once(staging, took=10.0, left=10.0 - TOLERATED_MS / 2)
    assert staging.nbytes == 0
    assert staging.stage(list(megabyte_tensors().values())) == {}


def test_the_late_part_is_staged_after_several_late_copies_and_no_more_after_that():
    sources = megabyte_tensors()
    staging = DeviceStaging(SnapshotLayout(sources, HOST, crosses_bus=True), HOST)
    for _ in range(LATE_COPIES):
        assert staging.nbytes == 0
        copy_once(staging, took=64.0, left=56.0)  # 8 of 64 MB are late
    copy_once(staging, took=64.0, left=56.0)
    assert 8 * MEGABYTE <= staging.nbytes <= MARGIN * 8 * MEGABYTE
    views = staging.stage(list(sources.values()))
    assert set(views) == set(range(64 - len(views), 64)), "the tensors that cross last"
    taken = staging.nbytes
    for _ in range(3 * LATE_COPIES):
        copy_once(staging, took=64.0, left=56.0)
    assert staging.nbytes == taken
    assert staging.note is not None
    assert "0.01 GB" in staging.note
    assert "device_staging = false" in staging.note


def test_one_or_two_late_copies_stage_nothing():
    staging = DeviceStaging(SnapshotLayout(megabyte_tensors(), HOST, crosses_bus=True), HOST)
    for _ in range(5):
        for _ in range(LATE_COPIES - 1):
            copy_once(staging, took=64.0, left=56.0)
        copy_once(staging, took=64.0, left=65.0)
    assert staging.nbytes == 0


def test_more_is_staged_when_steps_become_shorter():
    staging = DeviceStaging(SnapshotLayout(megabyte_tensors(), HOST, crosses_bus=True), HOST)
    for left in (60.0, 40.0):
        for _ in range(LATE_COPIES + 1):
            copy_once(staging, took=64.0, left=left)
    assert 24 * MEGABYTE <= staging.nbytes <= 31 * MEGABYTE
    views = staging.stage(list(megabyte_tensors().values()))
    assert sum(v.nbytes for v in views.values()) == staging.nbytes
    assert len({v.untyped_storage().data_ptr() for v in views.values()}) == 2, "memory is added, not replaced"


@pytest.mark.parametrize(("free", "limit"), [(32 * MEGABYTE, 4), (1 << 40, 32), (0, 0)])
def test_staging_takes_at_most_an_eighth_of_free_memory_and_half_of_the_snapshot(free, limit, device):
    device["bytes"] = free
    staging = DeviceStaging(SnapshotLayout(megabyte_tensors(), HOST, crosses_bus=True), HOST)
    for _ in range(5 * LATE_COPIES):
        copy_once(staging, took=64.0, left=1.0)
        device["bytes"] = free - staging.nbytes
    assert staging.nbytes <= limit * MEGABYTE
    assert staging.nbytes >= (limit - 1) * MEGABYTE


def test_if_the_device_is_out_of_memory_nothing_is_staged(monkeypatch):
    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError

    staging = DeviceStaging(SnapshotLayout(megabyte_tensors(), HOST, crosses_bus=True), HOST)
    for _ in range(LATE_COPIES):
        copy_once(staging, took=64.0, left=1.0)
    monkeypatch.setattr(module.torch, "empty", fail)
    for _ in range(2 * LATE_COPIES):
        copy_once(staging, took=64.0, left=1.0)
        assert staging.stage([]) == {}
    assert staging.note is None


def test_a_copy_without_a_following_update_does_not_count():
    staging = DeviceStaging(SnapshotLayout(megabyte_tensors(), HOST, crosses_bus=True), HOST)
    for _ in range(4 * LATE_COPIES):
        times = staging.begin_copy(0.0)
        times.read_begun.record(0.0)
        times.read_ended.record(64.0)
    assert staging.nbytes == 0


def test_staged_tensors_arrive_bit_for_bit_although_the_update_overwrites_their_sources(monkeypatch):
    monkeypatch.setattr(layout_module, "PIECE_BYTES", 1 << 18)
    monkeypatch.setattr(layout_module, "SMALL_BYTES", 1 << 10)
    sources = tensors()
    expected = {name: bits(value) for name, value in sources.items()}
    layout = SnapshotLayout(sources, HOST, crosses_bus=True)
    staging = DeviceStaging(layout, HOST)
    whole = sum(v.nbytes for v in sources.values())
    for _ in range(LATE_COPIES + 1):
        copy_once(staging, took=64.0, left=8.0, megabytes=whole / MEGABYTE)
    views = staging.stage(list(sources.values()))
    assert len(views) > 2
    buffer = buffer_of(layout)
    with torch.no_grad():
        buffer.fill(list(sources.values()), HOST, views)
        for value in sources.values():  # the next update
            value.zero_()
        buffer.fill_large(views)
    assert {name: bits(value) for name, value in buffer.tensors.items()} == expected
