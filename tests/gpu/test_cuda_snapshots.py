"""Snapshots of a run on a GPU: page-locked or on the device, exact, proven where they end up, nobody waiting. Skipped
without one."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "runtime"))

from cases import Case, assert_same
from test_exact import at, quick
from test_snapshot_blocks import bits, tensors
from test_snapshot_return import Bench, same

from holdfast.runtime.snapshots import layout as layout_module
from holdfast.runtime.snapshots import pinned_memory as pages
from holdfast.runtime.snapshots.buffer_pool import Block
from holdfast.runtime.snapshots.copier import Copier, seen
from holdfast.runtime.snapshots.layout import Layout
from holdfast.runtime.tensors import checksum as bits_module
from holdfast.runtime.tensors.checksum import checksum_and_finite, copy_and_checksum
from holdfast.runtime.tensors.inspect import bit_checksum
from holdfast.runtime.tensors.triton_kernels import OptionalKernel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
HOST, CUDA = torch.device("cpu"), torch.device("cuda", 0)
MEGABYTE = 1 << 20


class OnCuda(Bench):
    """The same by hand, on the device. Large enough for page-locked blocks of our own."""

    def __init__(self, width: int = 512, **config) -> None:
        self.width = width
        with torch.device("cuda"):
            super().__init__(**config)

    def build(self) -> nn.Module:
        with torch.device("cuda"):
            return nn.Sequential(
                nn.Linear(16, self.width), nn.BatchNorm1d(self.width), nn.Linear(self.width, self.width)
            )


@pytest.fixture(params=["host", "device"])
def place(request):
    return request.param


def test_locked_memory_is_locked_and_given_back(monkeypatch):
    for part in (pages.PART, MEGABYTE):
        monkeypatch.setattr(pages, "PART", part)
        memory, said = pages.locked(5 * MEGABYTE // 2, CUDA)
        assert said is None
        assert memory.is_pinned()
        address = memory.data_ptr()
        there = torch.arange(MEGABYTE // 4, dtype=torch.int32, device=CUDA)
        memory[:MEGABYTE].view(torch.int32).copy_(there, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(memory[:MEGABYTE].view(torch.int32), there.cpu())
        del memory
        gc.collect()
        with ThreadPoolExecutor(1) as elsewhere:  # CUDA remembers an error of this thread for the next kernel
            again = elsewhere.submit(torch.cuda.cudart().cudaHostUnregister, address)
            assert int(again.result()) != 0, "it was still registered"


@pytest.mark.parametrize("home", [HOST, None])
def test_a_block_holds_every_kind_of_tensor_bit_for_bit(home):
    sources = {n: t.detach().to(CUDA) for n, t in tensors().items()}
    layout = Layout(sources, home)
    if home is None:
        memory = {CUDA: torch.zeros(layout.sizes[CUDA], dtype=torch.uint8, device=CUDA)}
    else:
        memory = {HOST: pages.locked(max(layout.nbytes, 2 * MEGABYTE), CUDA)[0][: layout.nbytes]}
    block = Block(layout, memory)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        block.fill(list(sources.values()), CUDA)
        live = [torch.zeros_like(v) for v in sources.values()]
        looked = block.pour(live)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert [one.names for one in looked] == ([list(sources)] if home is None else [])
    for one in looked:
        assert one.sums.tolist() == [int(bit_checksum(v)) for v in sources.values()]
        assert one.bad[one.names.index("nan")] == 1
        assert one.bad[one.names.index("large")] == 0
    for (name, value), back in zip(sources.items(), live, strict=True):
        assert bits(block.tensors[name].cpu()) == bits(value.cpu()) == bits(back.cpu()), name


def test_what_crosses_is_looked_at_while_the_last_of_it_is_under_way(monkeypatch):
    monkeypatch.setattr(layout_module, "PIECE", MEGABYTE)
    sources = {f"t{i}": torch.randn(MEGABYTE, device=CUDA) for i in range(64)}
    copier = Copier(lambda name: None)
    copy = copier.start(sources, live=True)
    copier.wait()
    sums = copy.result().sums
    live = {name: torch.zeros_like(value) for name, value in sources.items()}
    for changed in ([], ["t3"], ["t3", "t63"]):
        for name in changed[-1:]:
            copy.tensors[name].view(torch.int32)[7] ^= 1
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with copier.beside() as beside:
                looked = copy.block.pour(list(live.values()), beside)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert [one.names for one in looked] == [[f"t{i}" for i in range(60)]]
        now, doubtful = seen(live, looked)
        assert [name for name in sources if now[name] != sums[name]] == changed
        assert not doubtful
    copier.close()


def test_a_run_goes_back_exactly_where_it_is_looked_at_meanwhile(tmp_path, monkeypatch):
    monkeypatch.setattr(layout_module, "PIECE", 1 << 10)
    monkeypatch.setattr(layout_module, "SMALL", 1 << 6)
    used: list[int] = []
    beside = Copier.beside

    @contextlib.contextmanager
    def counted(self):
        with beside(self) as look_at:
            yield lambda tensors: used.append(len(tensors)) or look_at(tensors)

    monkeypatch.setattr(Copier, "beside", counted)
    torch.use_deterministic_algorithms(True)
    try:
        case = Case(shuffle="unique", epochs=5, augment=True, device="cuda", config=quick("auto", max_consecutive=2))
        case.faults = at(case, 22, 23, 24)
        run = case.guarded(tmp_path / "run")
        assert "rollback" in run.actions()
        assert_same(run, case.reference(run))
        assert used, "some of it was looked at while the rest was under way"
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_is_brought_back_is_looked_at_where_it_has_arrived(monkeypatch):
    kept = {f"t{i}": torch.randn(n, device=CUDA) for i, n in enumerate((1, 3, 70_001, 1 << 20))}
    live = {n: torch.zeros_like(t) for n, t in kept.items()}
    seen = copy_and_checksum(live, list(kept.values()))
    assert seen is not None
    assert seen.sums.tolist() == checksum_and_finite(live).sums.tolist() == checksum_and_finite(kept).sums.tolist()
    assert all(torch.equal(live[n], t) for n, t in kept.items())
    assert {t._version for t in live.values()} == {1}, "autograd is to know of it"
    kept["t2"].view(torch.int32)[7] ^= 1
    again = copy_and_checksum(live, list(kept.values()))
    assert again is not None
    assert [a == b for a, b in zip(seen.sums.tolist(), again.sums.tolist(), strict=True)] == [True, True, False, True]
    monkeypatch.setattr(bits_module, "KERNEL", OptionalKernel(_no_kernel, "it goes another way"))
    assert copy_and_checksum(live, list(kept.values())) is None


def _no_kernel(device):
    raise ImportError("no Triton")


@pytest.mark.parametrize("staging", [True, False])
def test_what_is_late_is_put_aside_and_every_copy_is_what_was_there(staging):
    sources = {f"t{i}": torch.zeros(4 << 20, device=CUDA) for i in range(32)}  # half a gigabyte
    copier = Copier(lambda name: None, staging=staging)
    for turn in range(0, 16, 2):
        copies = []
        for n in (turn, turn + 1):  # the second begins while the last of the first is on its way
            for i, value in enumerate(sources.values()):
                value.fill_(100 * n + i)
            copies.append(copier.start(sources, live=True))
            copier.wait()
            for value in sources.values():  # the update that had to wait
                value.fill_(-1)
        for n, copy in enumerate(copies, turn):
            assert not copy.result().torn
            for i, value in enumerate(copy.tensors.values()):
                assert bool((value == 100 * n + i).all()), (n, i)
            copier.reclaim("heavy", copy)
    taken = sum(aside.nbytes for aside in copier._asides.values())
    assert bool(copier.notes()) == staging
    assert (taken > 100 * MEGABYTE) == staging
    assert taken <= sum(t.nbytes for t in sources.values()) // 2
    assert copier.put_nothing_aside() == staging
    copier.start(sources, live=True).result()
    assert not copier._asides
    copier.close()


def test_blocks_of_a_run_lie_where_they_should_and_are_few(place):
    bench = OnCuda(place=place)
    bench.go(30)
    kept = list(bench.snapshots.ring)
    for snapshot in kept:
        snapshot.examine()
        for tensor in snapshot.copy.tensors.values():
            assert tensor.is_pinned() if place == "host" else tensor.is_cuda
    assert len({t.untyped_storage().data_ptr() for s in kept for t in s.copy.tensors.values()}) == len(kept)
    assert bench.snapshots._copier.count("heavy", on_host=place == "host") <= bench.snapshots.ring.max_snapshots() + 1
    bench.snapshots.close()


@pytest.mark.parametrize(
    "name", ["model.0.weight", "optimizer.0.1.exp_avg_sq", "optimizer.0.2.step", "buffer.1.running_var"]
)
def test_a_copy_that_has_changed_is_passed_over_and_the_older_one_is_restored(name, place):
    bench = OnCuda(place=place)
    bench.go(4)
    expected = bench.bits()
    bench.go(4)
    there = {s.step: s for s in bench.snapshots.ring}
    for step in (7, 6):
        there[step].examine()
        there[step].tensors()[name].view(-1).view(torch.uint8)[0] ^= 1
    bench.train()
    found, passed = bench.snapshots.find_restore_point(7, 7)
    assert found is not None
    assert found.step == 4
    assert [(p.step, p.why) for p in passed] == [
        (s, f"its copy of {name} has changed since it was made") for s in (7, 6)
    ]
    assert bench.snapshots.restorer.is_partial, "its tensors are back, and the rest is not"
    bench.snapshots.restore(found)
    assert same(bench.bits(), expected)
    bench.snapshots.close()


def test_a_parameter_that_is_written_to_while_it_is_copied_is_not_certified():
    bench = OnCuda()
    bench.go(2)
    bench.train()
    bench.snapshots.on_update_submitted(bench.step)
    with torch.no_grad():
        bench.model[0].weight.add_(1.0)
    making = bench.snapshots._in_progress
    assert making is not None
    bench.snapshots.wait_for_copies()
    assert making.copy.result().torn
    bench.snapshots.close()


def test_tensors_are_put_back_without_waiting(place):
    bench = OnCuda(place=place)
    bench.go(6)
    found, _ = bench.snapshots.find_restore_point(5, 5)
    assert found is not None and found.light is not None
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        returning = bench.snapshots.restorer
        returning._put_tensors(found.light, found.tensors(), found, returning._as_they_came(found))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    bench.snapshots.restore(found)
    bench.snapshots.close()


def test_taking_one_waits_for_nothing_once_there_is_memory(place):
    bench = OnCuda(place=place)
    bench.go(30)
    for _ in range(4):
        bench.train()
        bench.snapshots.count_healthy_step(bench.step)
        torch.cuda.set_sync_debug_mode("error")
        try:
            bench.snapshots.on_update_submitted(bench.step)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        bench.snapshots.discard_in_progress()
    bench.snapshots.close()


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_fused"])
def test_a_run_with_snapshots_on_the_device_is_harmless_and_exact(optimizer, tmp_path):
    torch.use_deterministic_algorithms(True)
    try:
        config = quick("auto", max_consecutive=2)
        config["snapshot"] = {**config["snapshot"], "place": "device"}
        case = Case(optimizer=optimizer, shuffle="unique", epochs=5, augment=True, device="cuda", config=config)
        plain = case.guarded(tmp_path / "plain")
        assert not plain.actions()
        assert_same(plain, case.reference(plain))
        case.faults = at(case, 22, 23, 24)
        run = case.guarded(tmp_path / "run")
        assert "rollback" in run.actions()
        assert_same(run, case.reference(run))
    finally:
        torch.use_deterministic_algorithms(False)


def test_how_fast_it_goes(capsys):
    """Beside what a bare copy of the same size does; benchmarks/gpu measures it in a run, and against its bar."""
    sources = {f"model.{i}": torch.randn(4 << 20, device=CUDA) for i in range(200)}
    sources |= {f"optimizer.0.{i}.step": torch.ones((), device=CUDA) for i in range(200)}
    size = sum(t.nbytes for t in sources.values())
    copier = Copier(lambda name: None)
    for on_host in (True, False):
        copy = copier.start(sources, live=True, on_host=on_host)
        copy.wait()
        copy.result()
        assert copy.block is not None
        flat = copy.tensors["model.0"].new_empty(size // 4, pin_memory=on_host)
        there = torch.empty(size // 4, device=CUDA)
        ours = _seconds(lambda block=copy.block: block.pour(list(sources.values())))
        bare = _seconds(lambda flat=flat, there=there: there.copy_(flat, non_blocking=True))
        with capsys.disabled():
            place = "host" if on_host else "device"
            print(f"\nback from the {place}: {size / ours / 1e9:.1f} GB/s; a bare copy: {size / bare / 1e9:.1f} GB/s")
        assert bare / ours > (0.75 if on_host else 0.4)
    copier.close()


def _seconds(work) -> float:
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best
