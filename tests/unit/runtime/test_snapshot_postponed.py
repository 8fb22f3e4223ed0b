"""Snapshots whose copies begin after the backward, as on a GPU in a loop that waits for the device in every step."""

from __future__ import annotations

import pytest
import torch
from test_snapshot_restore import Bench, Data, same

from holdfast.core.base.types import Health
from holdfast.runtime.snapshots import manager
from holdfast.runtime.state.rng import Rng


class Postponing(Bench):
    def snapshot(self) -> list[str]:
        self.snapshots.count_healthy_step(self.step)
        self.snapshots.on_commit(self.step, dict)
        self.begin()
        return []

    def begin(self) -> None:
        buffers = self.state.buffers.capture()
        self.snapshots.on_step_begin(Rng().capture, buffers, Data(), dict, may_postpone=True)  # type: ignore[arg-type]


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(manager, "_on_cuda", lambda devices: True)
    bench = Postponing()
    bench.go(3)
    yield bench
    bench.snapshots.close()


def steps(bench: Bench) -> list[int]:
    return [snapshot.step for snapshot in bench.snapshots.ring]


def restored(bench: Bench, step: int) -> list[torch.Tensor]:
    found, _ = bench.snapshots.find_restore_point(step, step)
    assert found is not None and found.step == step
    bench.snapshots.restore(found)
    return bench.bits()


def test_the_state_is_that_of_the_beginning_of_the_step(bench):
    bench.train()
    bench.snapshot()
    expected = bench.bits()
    assert 4 not in steps(bench)
    bench.model(torch.randn(8, 16))  # moves the running statistics
    weight = bench.model[0].weight
    weight.data = weight.data * 2.0  # as a layer with a bounded norm does in its forward
    assert bench.snapshots.take_postponed() is None
    assert 4 in steps(bench)
    bench.go(2)
    assert same(restored(bench, 4), expected)


def test_a_write_between_the_beginning_and_the_copy_makes_it_torn(bench):
    bench.train()
    bench.snapshot()
    with torch.no_grad():
        bench.model[0].weight.add_(1.0)
    bench.snapshots.take_postponed()
    (snapshot,) = [each for each in bench.snapshots.ring if each.step == 4]
    bench.go(2)
    assert (snapshot.health, snapshot.why) == (Health.BAD, "a parameter changed while it was copied")


@pytest.mark.parametrize("what", ["another step begins", "the update", "a rollback", "a checkpoint", "a fork"])
def test_what_comes_instead_of_a_backward_takes_it(what, bench):
    bench.train()
    bench.snapshot()
    expected, snapshots = bench.bits(), bench.snapshots
    if what == "another step begins":
        bench.begin()
    elif what == "the update":
        snapshots.take_postponed()
        bench.train()
        snapshots.count_healthy_step(bench.step)
    elif what == "a rollback":
        snapshots.find_restore_point(4, 4)
    elif what == "a checkpoint":
        snapshots.take_now(4, "asked for", bench.state.buffers.capture(), Data(), dict)  # type: ignore[arg-type]
    else:
        snapshots.wait_until_idle()
    assert 4 in steps(bench)
    if what == "the update":
        assert same(restored(bench, 4), expected)


def test_a_return_to_an_earlier_step_forgets_it(bench):
    bench.train()
    bench.snapshot()
    bench.snapshots._drop_newer(3)
    bench.snapshots.take_postponed()
    assert 4 not in steps(bench)
