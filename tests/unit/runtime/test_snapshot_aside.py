"""The last part of a copy that is put aside: as much as was late, as much as there is room for, and bit for bit."""

from __future__ import annotations

import pytest
import torch
from test_snapshot_blocks import bits, block_of, tensors

from holdfast.runtime.snapshots import device_staging as module
from holdfast.runtime.snapshots import layout as layout_module
from holdfast.runtime.snapshots.device_staging import IN_A_ROW, LATE, MARGIN, Aside
from holdfast.runtime.snapshots.layout import Layout

HOST = torch.device("cpu")
MEGABYTE = 1 << 20


class Moment:
    """An event of a device that is not here. Recorded on a time in milliseconds, which stands for the stream."""

    def __init__(self) -> None:
        self.at: float | None = None

    def record(self, at: float) -> None:
        self.at = at

    def query(self) -> bool:
        return self.at is not None

    def elapsed_time(self, other: Moment) -> float:
        assert self.at is not None and other.at is not None
        return other.at - self.at


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """Memory of a device that has plenty of it."""
    free = {"bytes": 1 << 40}
    monkeypatch.setattr(module, "_event", Moment)
    monkeypatch.setattr(module, "free_on", lambda device: free["bytes"])
    return free


def many(count: int = 64) -> dict[str, torch.Tensor]:
    """Tensors of a megabyte each."""
    return {f"t{i}": torch.full((MEGABYTE // 4,), float(i)) for i in range(count)}


def cross(aside: Aside, *, took: float, left: float, megabytes: int = 64) -> None:
    """One copy: all of it takes `took` milliseconds, the next update is there after `left` of them."""
    times = aside.times(0.0)
    times.begun.record(0.0)
    times.over.record(took * (1 - aside.nbytes / (megabytes * MEGABYTE)))
    times.ask(left)


def test_nothing_is_put_aside_where_updates_do_not_wait():
    aside = Aside(Layout(many(), HOST, crossing=True), HOST)
    for _ in range(10):
        cross(aside, took=10.0, left=20.0)
        cross(aside, took=10.0, left=10.0 - LATE / 2)
    assert aside.nbytes == 0
    assert aside.put(list(many().values())) == {}


def test_what_is_late_again_and_again_is_put_aside_and_then_nothing_is_late():
    sources = many()
    aside = Aside(Layout(sources, HOST, crossing=True), HOST)
    for _ in range(IN_A_ROW):
        assert aside.nbytes == 0
        cross(aside, took=64.0, left=56.0)  # 8 of 64 MB to go
    cross(aside, took=64.0, left=56.0)
    assert 8 * MEGABYTE <= aside.nbytes <= MARGIN * 8 * MEGABYTE
    views = aside.put(list(sources.values()))
    assert set(views) == set(range(64 - len(views), 64)), "those that cross last"
    taken = aside.nbytes
    for _ in range(3 * IN_A_ROW):
        cross(aside, took=64.0, left=56.0)
    assert aside.nbytes == taken
    assert aside.note is not None
    assert "0.01 GB" in aside.note
    assert "device_staging = false" in aside.note


def test_what_was_late_once_or_twice_changes_nothing():
    aside = Aside(Layout(many(), HOST, crossing=True), HOST)
    for _ in range(5):
        for _ in range(IN_A_ROW - 1):
            cross(aside, took=64.0, left=56.0)
        cross(aside, took=64.0, left=65.0)
    assert aside.nbytes == 0


def test_more_is_put_aside_where_steps_become_shorter():
    aside = Aside(Layout(many(), HOST, crossing=True), HOST)
    for left in (60.0, 40.0):
        for _ in range(IN_A_ROW + 1):
            cross(aside, took=64.0, left=left)
    assert 24 * MEGABYTE <= aside.nbytes <= 31 * MEGABYTE
    views = aside.put(list(many().values()))
    assert sum(v.nbytes for v in views.values()) == aside.nbytes
    assert len({v.untyped_storage().data_ptr() for v in views.values()}) == 2, "what was there stays, more is added"


@pytest.mark.parametrize(("free", "most"), [(32 * MEGABYTE, 4), (1 << 40, 32), (0, 0)])
def test_no_more_than_an_eighth_of_what_is_free_and_half_of_the_whole_is_taken(free, most, device):
    device["bytes"] = free
    aside = Aside(Layout(many(), HOST, crossing=True), HOST)
    for _ in range(5 * IN_A_ROW):
        cross(aside, took=64.0, left=1.0)
        device["bytes"] = free - aside.nbytes
    assert aside.nbytes <= most * MEGABYTE
    assert aside.nbytes >= (most - 1) * MEGABYTE


def test_where_the_device_gives_none_copies_go_on_as_before(monkeypatch):
    def none(*args, **kwargs):
        raise torch.OutOfMemoryError

    aside = Aside(Layout(many(), HOST, crossing=True), HOST)
    for _ in range(IN_A_ROW):
        cross(aside, took=64.0, left=1.0)
    monkeypatch.setattr(module.torch, "empty", none)
    for _ in range(2 * IN_A_ROW):
        cross(aside, took=64.0, left=1.0)
        assert aside.put([]) == {}
    assert aside.note is None


def test_a_copy_that_nobody_has_waited_for_yet_teaches_nothing():
    aside = Aside(Layout(many(), HOST, crossing=True), HOST)
    for _ in range(4 * IN_A_ROW):
        times = aside.times(0.0)
        times.begun.record(0.0)
        times.over.record(64.0)
    assert aside.nbytes == 0


def test_what_is_put_aside_arrives_bit_for_bit_whatever_becomes_of_its_source(monkeypatch):
    monkeypatch.setattr(layout_module, "PIECE", 1 << 18)
    monkeypatch.setattr(layout_module, "SMALL", 1 << 10)
    sources = tensors()
    expected = {name: bits(value) for name, value in sources.items()}
    layout = Layout(sources, HOST, crossing=True)
    aside = Aside(layout, HOST)
    whole = sum(v.nbytes for v in sources.values())
    for _ in range(IN_A_ROW + 1):
        cross(aside, took=64.0, left=8.0, megabytes=whole / MEGABYTE)
    views = aside.put(list(sources.values()))
    assert len(views) > 2
    block = block_of(layout)
    with torch.no_grad():
        block.fill(list(sources.values()), HOST, views)
        for value in sources.values():  # the next update
            value.zero_()
        block.fill_later(views)
    assert {name: bits(value) for name, value in block.tensors.items()} == expected
