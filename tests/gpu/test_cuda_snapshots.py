"""Snapshots on a GPU, in pinned memory or on the device: exact, verified in place, without waiting. Skipped otherwise."""

from __future__ import annotations

import contextlib
import gc
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import Case, assert_same
from classic import LOOPS, ScaledWeights
from test_exact import at, quick, without
from test_snapshot_buffers import bits, tensors
from test_snapshot_restore import Bench, same
from torch import nn

from holdfast.runtime.snapshots import layout as layout_module
from holdfast.runtime.snapshots import pinned_memory
from holdfast.runtime.snapshots.buffer_pool import SnapshotBuffer
from holdfast.runtime.snapshots.copier import Copier, checksum_all
from holdfast.runtime.snapshots.layout import SnapshotLayout
from holdfast.runtime.snapshots.manager import SnapshotManager
from holdfast.runtime.tensors import checksum as bits_module
from holdfast.runtime.tensors.checksum import checksum_and_finite, copy_and_checksum
from holdfast.runtime.tensors.inspect import bit_checksum
from holdfast.runtime.tensors.triton_kernels import OptionalKernel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
HOST, CUDA = torch.device("cpu"), torch.device("cuda", 0)
MEGABYTE = 1 << 20


class OnCuda(Bench):
    """A bench on the device, large enough for registered memory."""

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


def test_pinned_memory_is_pinned_and_unregistered_when_freed(monkeypatch):
    for part in (pinned_memory.REGISTER_BYTES, MEGABYTE):
        monkeypatch.setattr(pinned_memory, "REGISTER_BYTES", part)
        memory, warning = pinned_memory.allocate_pinned(5 * MEGABYTE // 2, CUDA)
        assert warning is None
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


@pytest.mark.parametrize("destination", [HOST, None])
def test_a_buffer_holds_tensors_of_every_kind_bit_for_bit(destination):
    sources = {n: t.detach().to(CUDA) for n, t in tensors().items()}
    layout = SnapshotLayout(sources, destination)
    if destination is None:
        memory = {CUDA: torch.zeros(layout.sizes[CUDA], dtype=torch.uint8, device=CUDA)}
    else:
        memory = {HOST: pinned_memory.allocate_pinned(max(layout.nbytes, 2 * MEGABYTE), CUDA)[0][: layout.nbytes]}
    buffer = SnapshotBuffer(layout, memory)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        buffer.fill(list(sources.values()), CUDA)
        live = [torch.zeros_like(v) for v in sources.values()]
        results = buffer.copy_back(live)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert [each.names for each in results] == ([list(sources)] if destination is None else [])
    for each in results:
        assert each.sums.tolist() == [int(bit_checksum(v)) for v in sources.values()]
        assert each.maybe_nonfinite[each.names.index("nan")] == 1
        assert each.maybe_nonfinite[each.names.index("large")] == 0
    for (name, value), back in zip(sources.items(), live, strict=True):
        assert bits(buffer.tensors[name].cpu()) == bits(value.cpu()) == bits(back.cpu()), name


def test_checksums_start_while_the_last_tensors_are_still_crossing(monkeypatch):
    monkeypatch.setattr(layout_module, "PIECE_BYTES", MEGABYTE)
    sources = {f"t{i}": torch.randn(MEGABYTE, device=CUDA) for i in range(64)}
    copier = Copier(lambda name: None)
    copy = copier.start(sources, live=True)
    copier.wait()
    sums = copy.result().checksums
    live = {name: torch.zeros_like(value) for name, value in sources.items()}
    for changed in ([], ["t3"], ["t3", "t63"]):
        for name in changed[-1:]:
            copy.tensors[name].view(torch.int32)[7] ^= 1
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with copier.concurrent_checksums() as checksum:
                results = copy.buffer.copy_back(list(live.values()), checksum)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert [each.names for each in results] == [[f"t{i}" for i in range(60)]]
        now, doubtful = checksum_all(live, results)
        assert [name for name in sources if now[name] != sums[name]] == changed
        assert not doubtful
    copier.close()


def test_a_rollback_is_exact_with_concurrent_checksums(tmp_path, monkeypatch):
    monkeypatch.setattr(layout_module, "PIECE_BYTES", 1 << 10)
    monkeypatch.setattr(layout_module, "SMALL_BYTES", 1 << 6)
    used: list[int] = []
    original = Copier.concurrent_checksums

    @contextlib.contextmanager
    def counted(self):
        with original(self) as checksum:
            yield lambda tensors: used.append(len(tensors)) or checksum(tensors)

    monkeypatch.setattr(Copier, "concurrent_checksums", counted)
    torch.use_deterministic_algorithms(True)
    try:
        case = Case(shuffle="unique", epochs=5, augment=True, device="cuda", config=quick("auto", max_consecutive=2))
        case.faults = at(case, 22, 23, 24)
        run = case.guarded(tmp_path / "run")
        assert "rollback" in run.actions()
        assert_same(run, case.reference(run))
        assert used, "some checksums ran while other tensors were crossing"
    finally:
        torch.use_deterministic_algorithms(False)


def test_copy_and_checksum_sums_what_arrived(monkeypatch):
    kept = {f"t{i}": torch.randn(n, device=CUDA) for i, n in enumerate((1, 3, 70_001, 1 << 20))}
    live = {n: torch.zeros_like(t) for n, t in kept.items()}
    seen = copy_and_checksum(live, list(kept.values()))
    assert seen is not None
    assert seen.sums.tolist() == checksum_and_finite(live).sums.tolist() == checksum_and_finite(kept).sums.tolist()
    assert all(torch.equal(live[n], t) for n, t in kept.items())
    assert {t._version for t in live.values()} == {1}, "autograd notices the write"
    kept["t2"].view(torch.int32)[7] ^= 1
    again = copy_and_checksum(live, list(kept.values()))
    assert again is not None
    assert [a == b for a, b in zip(seen.sums.tolist(), again.sums.tolist(), strict=True)] == [True, True, False, True]
    monkeypatch.setattr(bits_module, "KERNEL", OptionalKernel(_no_kernel, "without the kernel"))
    assert copy_and_checksum(live, list(kept.values())) is None


def _no_kernel(device):
    raise ImportError("no Triton")


@pytest.mark.parametrize("staging", [True, False])
def test_late_tensors_are_staged_and_every_copy_is_exact(staging):
    sources = {f"t{i}": torch.zeros(4 << 20, device=CUDA) for i in range(32)}  # half a gigabyte
    copier = Copier(lambda name: None, staging=staging)
    for turn in range(0, 16, 2):
        copies = []
        for n in (turn, turn + 1):  # the second begins while the first is still crossing
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
            copier.reclaim("update_tensors", copy)
    taken = sum(each.nbytes for each in copier._staging.values())
    assert bool(copier.notes()) == staging
    assert (taken > 100 * MEGABYTE) == staging
    assert taken <= sum(t.nbytes for t in sources.values()) // 2
    assert copier.stop_staging() == staging
    copier.start(sources, live=True).result()
    assert not copier._staging
    copier.close()


def test_buffers_are_in_the_configured_memory_and_few(place):
    bench = OnCuda(place=place)
    bench.go(30)
    kept = list(bench.snapshots.ring)
    for snapshot in kept:
        snapshot.inspect()
        for tensor in snapshot.copy.tensors.values():
            assert tensor.is_pinned() if place == "host" else tensor.is_cuda
    assert len({t.untyped_storage().data_ptr() for s in kept for t in s.copy.tensors.values()}) == len(kept)
    assert (
        bench.snapshots._copier.count("update_tensors", on_host=place == "host")
        <= bench.snapshots.ring.max_snapshots() + 1
    )
    bench.snapshots.close()


@pytest.mark.parametrize(
    "name", ["model.0.weight", "optimizer.0.1.exp_avg_sq", "optimizer.0.2.step", "buffer.1.running_var"]
)
def test_a_corrupted_snapshot_is_rejected_and_an_older_one_is_restored(name, place):
    bench = OnCuda(place=place)
    bench.go(4)
    expected = bench.bits()
    bench.go(4)
    by_step = {s.step: s for s in bench.snapshots.ring}
    for step in (7, 6):
        by_step[step].inspect()
        by_step[step].tensors()[name].view(-1).view(torch.uint8)[0] ^= 1
    bench.train()
    found, rejected = bench.snapshots.find_restore_point(7, 7)
    assert found is not None
    assert found.step == 4
    assert [(p.step, p.why) for p in rejected] == [
        (s, f"its copy of {name} has changed since it was made") for s in (7, 6)
    ]
    assert bench.snapshots.restorer.is_partial, "only the tensors are restored"
    bench.snapshots.restore(found)
    assert same(bench.bits(), expected)
    bench.snapshots.close()


def test_a_parameter_written_to_during_the_copy_makes_it_torn():
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


def test_tensors_are_written_back_without_synchronizing(place):
    bench = OnCuda(place=place)
    bench.go(6)
    found, _ = bench.snapshots.find_restore_point(5, 5)
    assert found is not None and found.small_state is not None
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        restorer = bench.snapshots.restorer
        restorer._write_tensors(found.small_state, found.tensors(), found, restorer._matching_tensors(found))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    bench.snapshots.restore(found)
    bench.snapshots.close()


def test_taking_a_snapshot_does_not_synchronize_once_memory_is_allocated(place):
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


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_fused"])
def test_copies_that_begin_after_the_backward_are_exact(loop, optimizer, tmp_path, monkeypatch):
    taken, take = [], SnapshotManager.take_postponed
    monkeypatch.setattr(
        SnapshotManager, "take_postponed", lambda self: (taken.append(self.postponed is not None), take(self))[1]
    )
    case = Case(optimizer=optimizer, shuffle="unique", count=160, epochs=7, linear=True, norm=False, device="cuda")
    case.config = quick("auto", watch_steps=8)
    run = LOOPS[loop](case, tmp_path / "run", hooks=[ScaledWeights(81, 50.0)])
    assert run.actions() == ["rollback"] and sum(taken) > 10
    assert_same(run, case.plain(without(case)))


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


def test_copying_back_is_nearly_as_fast_as_one_plain_copy(capsys):
    """Compared with one plain copy of the same size; benchmarks/gpu measures a whole run."""
    sources = {f"model.{i}": torch.randn(4 << 20, device=CUDA) for i in range(200)}
    sources |= {f"optimizer.0.{i}.step": torch.ones((), device=CUDA) for i in range(200)}
    size = sum(t.nbytes for t in sources.values())
    copier = Copier(lambda name: None)
    for on_host in (True, False):
        copy = copier.start(sources, live=True, on_host=on_host)
        copy.wait()
        copy.result()
        assert copy.buffer is not None
        flat = copy.tensors["model.0"].new_empty(size // 4, pin_memory=on_host)
        there = torch.empty(size // 4, device=CUDA)
        ours = _seconds(lambda buffer=copy.buffer: buffer.copy_back(list(sources.values())))
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
