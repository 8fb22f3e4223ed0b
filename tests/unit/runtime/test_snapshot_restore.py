"""Snapshots from taking to restoring: how many copies exist, what training waits for, and what is verified."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.core.base.config import SnapshotSection
from holdfast.core.base.errors import StepError
from holdfast.core.base.types import Health
from holdfast.core.checkpoints.lineage import Lineage
from holdfast.runtime.data.source import Position
from holdfast.runtime.guard.setup import build_state
from holdfast.runtime.snapshots import buffer_pool, restore
from holdfast.runtime.snapshots.copier import Copier
from holdfast.runtime.snapshots.manager import SnapshotManager
from holdfast.runtime.snapshots.restore import Restorer
from holdfast.runtime.state.rng import Rng


class Disk:
    """Accepts snapshots, and reads them until the test sets `written`."""

    lineage = Lineage()

    def __init__(self, every: int = 0) -> None:
        self.every_steps, self.timed_step = every, None
        self.reading: list[Any] = []

    def save_reason(self, step: int, *, initial: bool = False) -> str | None:
        return "scheduled" if self.every_steps and step and step % self.every_steps == 0 else None

    def submit(self, snapshot: Any, stalled_seconds: float) -> None:
        snapshot.written.clear()
        self.reading.append(snapshot)


class Data:
    position = Position(*([0] * len(Position._fields)))

    def save(self, *, user_code: bool = True) -> dict[str, Any]:
        return {}


class Bench:
    """A model with optimizer state, and a snapshot manager that the test drives."""

    def __init__(self, disk: Disk | None = None, **config: Any) -> None:
        torch.manual_seed(1)
        self.model = self.build()
        self.model[0].register_buffer("graph", torch.eye(3).to_sparse())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.state = build_state(self.model, self.optimizer, None, None, None)
        self.disk = disk or Disk()
        settings = {"every_steps": 1, "reach_steps": 4, "certify_after": 1, "memory_gb": 1.0, **config}
        self.snapshots = SnapshotManager(SnapshotSection(**settings), self.state, Rng(), self.disk)
        self.snapshots.begin_run(0)
        self.step = 0

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 1))

    def train(self) -> None:
        self.snapshots.wait_for_copies()
        for p in self.model.parameters():
            p.grad = torch.randn_like(p)
        self.optimizer.step()
        self.step += 1

    def snapshot(self) -> list[str]:
        """Commit the step and begin the next one. Returns the notes."""
        snapshots = self.snapshots
        snapshots.count_healthy_step(self.step)
        snapshots.on_commit(self.step, dict)
        note = snapshots.on_step_begin(Rng().capture, self.state.buffers.capture(), Data(), dict)  # type: ignore[arg-type]
        return [note] if note else []

    def go(self, steps: int) -> None:
        for _ in range(steps):
            self.train()
            self.snapshot()

    def bits(self) -> list[torch.Tensor]:
        return [v.detach().to_dense().clone() for v in (*self.state.update_tensors().values(), *self.model.buffers())]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(params=["host", "device"])
def place(request):
    return request.param


def test_a_long_run_reuses_the_same_buffers(place):
    bench = Bench(place=place)
    bench.go(40)
    snapshots = bench.snapshots
    assert snapshots._copier.count("update_tensors", on_host=place == "host") <= snapshots.ring.max_snapshots() + 1
    storages = {t.untyped_storage().data_ptr() for s in snapshots.ring for t in s.copy.tensors.values()}
    assert len(storages) == len(snapshots.ring), "one buffer per snapshot"
    snapshots.close()


def test_a_parameter_that_is_given_other_memory_while_it_is_copied_is_copied_as_it_was():
    bench = Bench()
    bench.go(3)
    bench.train()
    may_copy = threading.Event()
    bench.snapshots._copier._copy_thread.submit(may_copy.wait, 60)
    expected = bench.bits()
    bench.snapshot()
    weight = bench.model[0].weight
    weight.data = weight.data * 2.0  # a layer that bounds its norm in its forward
    may_copy.set()
    bench.go(1)
    found, _ = bench.snapshots.find_restore_point(4, 4)
    assert found is not None and found.step == 4
    bench.snapshots.restore(found)
    assert same(bench.bits(), expected)
    bench.snapshots.close()


def test_training_waits_for_a_slow_disk_and_takes_no_more_memory():
    bench = Bench(Disk(every=1))
    snapshots = bench.snapshots
    limit = snapshots.ring.max_snapshots() + 1
    notes: list[str] = []
    while snapshots._copier.count("update_tensors", on_host=True) < limit:
        bench.train()
        notes += bench.snapshot()
    assert notes == []
    for again in range(2):
        while snapshots._copier.has_ready("update_tensors", on_host=True):
            bench.train()
            bench.snapshot()
        bench.train()
        stalled = snapshots.stalled_seconds
        waiting = threading.Thread(target=lambda: notes.extend(bench.snapshot()))
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive(), "it took memory beyond the limit"
        for snapshot in snapshots._placement._leaving:
            snapshot.written.set()
        waiting.join(10)
        assert not waiting.is_alive()
        assert snapshots._copier.count("update_tensors", on_host=True) <= limit
        assert snapshots.stalled_seconds - stalled > 0.1
        assert len(notes) == 1, f"noted once ({again})"
    assert "waits for the disk" in notes[0]
    for snapshot in bench.disk.reading:
        snapshot.written.set()
    snapshots.close()


def memory_for(copies: int, place: str) -> float:
    """Return the memory_gb for exactly so many snapshots of a bench."""
    bench = Bench(place=place)
    bench.go(2)
    (room,) = bench.snapshots._rooms
    bench.snapshots.close()
    return (copies * room.nbytes + 1) / 1e9


@pytest.mark.parametrize("copies", [2, 3])
def test_with_room_for_few_there_are_never_more_and_each_good_one_is_exact(copies, place):
    bench = Bench(Disk(every=5), place=place, certify_after=4, memory_gb=memory_for(copies, place))
    snapshots, states = bench.snapshots, {}
    for _ in range(40):
        bench.train()
        states[bench.step] = bench.bits()
        bench.snapshot()
        for saved in bench.disk.reading:
            saved.written.set()
        assert snapshots._copier.count("update_tensors", on_host=place == "host") <= copies
        assert len(snapshots.ring) <= copies
        assert bench.step <= 4 or any(s.health is Health.GOOD for s in snapshots.ring)
    for _ in range(2):
        bench.train()
        found, _ = snapshots.find_restore_point(bench.step, bench.step)
        assert found is not None and found.step > 30
        snapshots.restore(found)
        assert same(bench.bits(), states[found.step])
        bench.step = found.step
        bench.go(1)
    snapshots.close()


def test_with_room_for_two_a_snapshot_waits_for_the_disk_that_reads_the_other():
    bench = Bench(Disk(every=4), certify_after=1, memory_gb=memory_for(2, "host"))
    snapshots = bench.snapshots
    bench.go(4)
    (saved,) = bench.disk.reading
    waiting = threading.Thread(target=lambda: [bench.go(1) for _ in range(6)])
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive(), "it took memory for a third"
    assert snapshots._copier.count("update_tensors", on_host=True) == 2
    saved.written.set()
    while waiting.is_alive():
        for each in bench.disk.reading:
            each.written.set()
        waiting.join(0.05)
    assert bench.step == 10
    assert snapshots._copier.count("update_tensors", on_host=True) == 2
    snapshots.close()


class FullMemory:
    """Makes the allocation of snapshot buffers in one place fail while `is_full` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, on_host: bool) -> None:
        self.is_full, self.failures = False, 0
        allocate = Copier._allocate

        def fail_if_full(copier: Copier, layout: Any) -> Any:
            if self.is_full and (layout.destination is not None) == on_host:
                self.failures += 1
                raise torch.OutOfMemoryError("no memory left")
            return allocate(copier, layout)

        monkeypatch.setattr(Copier, "_allocate", fail_if_full)


def test_if_the_device_is_full_snapshots_move_to_the_host_and_stay_exact(monkeypatch):
    memory = FullMemory(monkeypatch, on_host=False)
    bench = Bench(place="device")
    bench.go(2)
    on_device = bench.bits()
    memory.is_full = True
    notes: list[str] = []
    while not memory.failures:
        bench.train()
        notes += bench.snapshot()
    assert notes == ["the device has no memory left for a snapshot: from now on snapshots are kept in host memory"]
    first_on_host, step = bench.bits(), bench.step
    bench.go(1)
    copies = {s.step: s.copy.buffer.layout.destination for s in bench.snapshots.ring if s.copy.buffer is not None}
    assert copies[2] is None and copies[step] == torch.device("cpu")
    for target, expected in ((step, first_on_host), (2, on_device)):
        found, _ = bench.snapshots.find_restore_point(target, target)
        assert found is not None and found.step == target
        bench.snapshots.restore(found)
        assert same(bench.bits(), expected)
    bench.step = 2
    for _ in range(40):
        bench.train()
        assert bench.snapshot() == [], "noted once"
    assert memory.failures == 1, "the device is not asked again"
    assert bench.snapshots._copier.count("update_tensors", on_host=False) == 0, "the device memory is given back"
    bench.snapshots.close()


def test_if_the_host_is_full_snapshots_are_left_out_until_there_is_room(monkeypatch):
    memory = FullMemory(monkeypatch, on_host=True)
    bench = Bench()
    bench.go(1)
    memory.is_full = True
    notes: list[str] = []
    while not memory.failures:
        bench.train()
        notes += bench.snapshot()
    lost = bench.step
    assert memory.failures == 2, "it is tried once more"
    assert [note.split(":")[0] for note in notes] == [f"memory ran out while a snapshot of step {lost} was taken"]
    memory.is_full = False
    bench.train()
    expected = bench.bits()
    assert bench.snapshot() == []
    bench.go(1)
    assert lost not in [s.step for s in bench.snapshots.ring]
    found, _ = bench.snapshots.find_restore_point(lost + 1, lost + 1)
    assert found is not None and found.step == lost + 1
    bench.snapshots.restore(found)
    assert same(bench.bits(), expected)
    bench.snapshots.close()


@pytest.fixture(params=["in memory", "in place"])
def verified(request, monkeypatch):
    if request.param == "in place":
        monkeypatch.setattr(Restorer, "verifies_in_place", lambda self, snapshot: True)
    return request.param


def flip(snapshot: Any, name: str) -> None:
    snapshot.inspect()
    snapshot.tensors()[name].view(-1).view(torch.uint8)[0] ^= 1


@pytest.mark.parametrize(
    "name", ["model.0.weight", "optimizer.0.1.exp_avg_sq", "optimizer.0.2.step", "buffer.1.running_var"]
)
def test_a_corrupted_snapshot_is_rejected_and_an_older_one_is_restored(name, verified, place):
    bench = Bench(place=place)
    bench.go(4)
    expected = bench.bits()
    bench.go(4)
    snapshots = bench.snapshots
    by_step = {s.step: s for s in snapshots.ring}
    for step in (7, 6):
        flip(by_step[step], name)
    bench.train()
    found, rejected = snapshots.find_restore_point(7, 7)
    assert found is not None
    assert found.step == 4
    why = f"its copy of {name} has changed since it was made"
    assert [(p.step, p.why) for p in rejected] == [(7, why), (6, why)]
    assert by_step[7].health is by_step[6].health is Health.BAD
    assert snapshots.restorer.is_partial == (verified == "in place")
    snapshots.restore(found)
    assert same(bench.bits(), expected)
    assert not snapshots.restorer.is_partial
    bench.step = 4
    bench.go(2)
    snapshots.close()


def test_restore_is_exact_if_optimizer_state_was_added_or_lost_since(verified, place):
    """The initial state has no optimizer state; later that of one parameter is lost."""
    bench = Bench(place=place)
    before = bench.bits()
    bench.snapshot()
    bench.go(4)
    expected = bench.bits()
    bench.go(2)
    del bench.optimizer.state[bench.model[0].weight]
    found, _ = bench.snapshots.find_restore_point(4, 4)
    assert found is not None
    assert found.step == 4
    bench.snapshots.restore(found)
    names = sorted(bench.state.update_tensors())
    assert names == sorted(found.copy.tensors)
    assert all(torch.equal(found.copy.tensors[n], v) for n, v in bench.state.update_tensors().items())
    assert sum(v.numel() for v in bench.bits()) == sum(v.numel() for v in expected)
    found, _ = bench.snapshots.find_restore_point(0, 0)
    assert found is not None
    bench.snapshots.restore(found)
    assert same(bench.bits(), before)
    assert not bench.optimizer.state
    bench.snapshots.close()


def test_a_partly_restored_state_is_not_saved(monkeypatch):
    monkeypatch.setattr(Restorer, "verifies_in_place", lambda self, snapshot: True)
    bench = Bench()
    bench.go(4)
    for snapshot in list(bench.snapshots.ring):
        flip(snapshot, "model.0.weight")
    found, rejected = bench.snapshots.find_restore_point(4, 4)
    assert found is None
    assert len(rejected) >= 2
    bench.step += 1
    with pytest.raises(StepError, match="failed halfway, so the current state is not saved"):
        bench.snapshot()
    bench.snapshots.close()


def test_a_restore_enqueues_its_copies_in_a_few_calls(monkeypatch):
    bench = Bench()
    bench.go(4)
    found, _ = bench.snapshots.find_restore_point(4, 4)
    bench.snapshots.wait_until_idle()
    calls: list[int] = []
    foreach = torch._foreach_copy_
    for module in (buffer_pool, restore):
        monkeypatch.setattr(module, "foreach_copy_", lambda a, b, *more: calls.append(len(a)) or foreach(a, b, *more))
    assert found is not None
    assert found.small_state is not None
    restorer = bench.snapshots.restorer
    restorer._write_tensors(found.small_state, found.tensors(), found, restorer._matching_tensors(found))
    assert sum(calls) == len(bench.state.update_tensors()) + 3, "BatchNorm has three buffers"
    assert len(calls) == 2
    bench.snapshots.restore(found)
    bench.snapshots.close()
