"""Snapshots between being taken and being returned to: how many copies there are, who is waited for, what is proven."""

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
from holdfast.runtime.snapshots.manager import SnapshotManager
from holdfast.runtime.snapshots.restore import Restorer
from holdfast.runtime.state.rng import Rng


class Disk:
    """Takes snapshots, and reads them until it is told to let go."""

    lineage = Lineage()

    def __init__(self, every: int = 0) -> None:
        self.every = every
        self.reading: list[Any] = []

    def save_reason(self, step: int, *, initial: bool = False) -> str | None:
        return "scheduled" if self.every and step and step % self.every == 0 else None

    def submit(self, snapshot: Any) -> None:
        snapshot.written.clear()
        self.reading.append(snapshot)


class Data:
    position = Position(*([0] * len(Position._fields)))

    def save(self) -> dict[str, Any]:
        return {}


class Bench:
    """A model with optimizer state, and a snapshot manager that is driven by hand."""

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
        """The step is committed and the next begins: what was said."""
        snapshots = self.snapshots
        snapshots.count_healthy_step(self.step)
        snapshots.on_commit(self.step, dict)
        said = snapshots.on_step_begin(Rng().capture, self.state.buffers.capture(), Data(), dict)  # type: ignore[arg-type]
        return [said] if said else []

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


def test_a_long_run_uses_the_same_blocks_again(place):
    bench = Bench(place=place)
    bench.go(40)
    snapshots = bench.snapshots
    assert snapshots._copier.count("heavy", on_host=place == "host") <= snapshots.ring.max_snapshots() + 1
    storages = {t.untyped_storage().data_ptr() for s in snapshots.ring for t in s.copy.tensors.values()}
    assert len(storages) == len(snapshots.ring), "one block a snapshot"
    snapshots.close()


def test_a_slow_disk_is_waited_for_and_no_more_memory_is_taken():
    bench = Bench(Disk(every=1))
    snapshots = bench.snapshots
    most = snapshots.ring.max_snapshots() + 1
    said: list[str] = []
    while snapshots._copier.count("heavy", on_host=True) < most:
        bench.train()
        said += bench.snapshot()
    assert said == []
    for again in range(2):
        while snapshots._copier.ready("heavy", on_host=True):
            bench.train()
            bench.snapshot()
        bench.train()
        stalled = snapshots.stalled_seconds
        waiting = threading.Thread(target=lambda: said.extend(bench.snapshot()))
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive(), "it takes memory that it was not given"
        for snapshot in snapshots._placement._leaving:
            snapshot.written.set()
        waiting.join(10)
        assert not waiting.is_alive()
        assert snapshots._copier.count("heavy", on_host=True) <= most
        assert snapshots.stalled_seconds - stalled > 0.1
        assert len(said) == 1, f"told once, not again ({again})"
    assert "waits for the disk" in said[0]
    for snapshot in bench.disk.reading:
        snapshot.written.set()
    snapshots.close()


@pytest.fixture(params=["before", "in place"])
def proof(request, monkeypatch):
    if request.param == "in place":
        monkeypatch.setattr(Restorer, "proves_in_place", lambda self, snapshot: True)
    return request.param


def flip(snapshot: Any, name: str) -> None:
    snapshot.examine()
    snapshot.tensors()[name].view(-1).view(torch.uint8)[0] ^= 1


@pytest.mark.parametrize(
    "name", ["model.0.weight", "optimizer.0.1.exp_avg_sq", "optimizer.0.2.step", "buffer.1.running_var"]
)
def test_a_copy_that_has_changed_is_passed_over_and_the_older_one_is_restored(name, proof, place):
    bench = Bench(place=place)
    bench.go(4)
    expected = bench.bits()
    bench.go(4)
    snapshots = bench.snapshots
    there = {s.step: s for s in snapshots.ring}
    for step in (7, 6):
        flip(there[step], name)
    bench.train()
    found, passed = snapshots.find_restore_point(7, 7)
    assert found is not None
    assert found.step == 4
    why = f"its copy of {name} has changed since it was made"
    assert [(p.step, p.why) for p in passed] == [(7, why), (6, why)]
    assert there[7].health is there[6].health is Health.BAD
    assert snapshots.restorer.is_partial == (proof == "in place")
    snapshots.restore(found)
    assert same(bench.bits(), expected)
    assert not snapshots.restorer.is_partial
    bench.step = 4
    bench.go(2)
    snapshots.close()


def test_restoring_is_exact_when_state_has_come_or_gone_since(proof, place):
    """The state a run begins with has no optimizer state; later one of a parameter may be lost."""
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


def test_until_all_of_it_is_back_nothing_is_saved(monkeypatch):
    monkeypatch.setattr(Restorer, "proves_in_place", lambda self, snapshot: True)
    bench = Bench()
    bench.go(4)
    for snapshot in list(bench.snapshots.ring):
        flip(snapshot, "model.0.weight")
    found, passed = bench.snapshots.find_restore_point(4, 4)
    assert found is None
    assert len(passed) >= 2
    bench.step += 1
    with pytest.raises(StepError, match="nothing is saved of it"):
        bench.snapshot()
    bench.snapshots.close()


def test_all_copies_of_a_restore_are_enqueued_in_a_few_calls(monkeypatch):
    bench = Bench()
    bench.go(4)
    found, _ = bench.snapshots.find_restore_point(4, 4)
    bench.snapshots.wait_until_idle()
    calls: list[int] = []
    foreach = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda a, b, *more: calls.append(len(a)) or foreach(a, b, *more))
    assert found is not None
    assert found.light is not None
    returning = bench.snapshots.restorer
    returning._put_tensors(found.light, found.tensors(), found, returning._as_they_came(found))
    assert sum(calls) == len(bench.state.update_tensors()) + 3, "BatchNorm has three buffers"
    assert len(calls) == 2
    bench.snapshots.restore(found)
    bench.snapshots.close()
