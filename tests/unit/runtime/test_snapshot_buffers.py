"""The memory of snapshots: laid out once, filled and copied back bit for bit, pinned and freed, and bounded."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from torch import nn

from holdfast.runtime.snapshots import buffer_pool as pool_module
from holdfast.runtime.snapshots import layout as layout_module
from holdfast.runtime.snapshots import pinned_memory
from holdfast.runtime.snapshots.buffer_pool import BufferPool, SnapshotBuffer
from holdfast.runtime.snapshots.copier import Copier
from holdfast.runtime.snapshots.layout import SnapshotLayout
from holdfast.runtime.tensors.checksum import Checksums, checksum_and_finite

HOST = torch.device("cpu")


def tensors() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    made = {
        "weight": nn.Parameter(torch.randn(37, 53, generator=g)),
        "half": torch.randn(9, 11, generator=g).half(),
        "brain": torch.randn(5, generator=g).bfloat16(),
        "double": torch.randn(4, 4, generator=g).double(),
        "eight": torch.randn(6, generator=g).to(torch.float8_e4m3fn),
        "complex": torch.randn(7, generator=g, dtype=torch.complex64),
        "flags": torch.rand(13, generator=g) > 0.5,
        "count": torch.tensor(7, dtype=torch.int64),
        "step": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
        "transposed": torch.randn(300, 400, generator=g).t(),
        "picture": torch.randn(2, 3, 200, 200, generator=g).to(memory_format=torch.channels_last),
        "strided": torch.randn(64, 64, generator=g)[::2, ::3],
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "large": torch.randn(1 << 17, generator=g),
        "larger": torch.randn(3, 70_000, generator=g),
    }
    return made


def bits(value: torch.Tensor) -> bytes:
    flat = value.detach().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def buffer_of(layout: SnapshotLayout) -> SnapshotBuffer:
    return SnapshotBuffer(layout, {home: torch.zeros(size, dtype=torch.uint8) for home, size in layout.sizes.items()})


@pytest.mark.parametrize("piece", [1 << 12, 1 << 18, 64 << 20])
@pytest.mark.parametrize("crosses_bus", [False, True])
def test_a_buffer_holds_tensors_of_every_kind_bit_for_bit_and_copies_them_back(crosses_bus, piece, monkeypatch):
    monkeypatch.setattr(layout_module, "PIECE_BYTES", piece)
    monkeypatch.setattr(layout_module, "SMALL_BYTES", 1 << 14)
    monkeypatch.setattr(layout_module, "MAX_PACK_BYTES", 1 << 12)
    sources = tensors()
    layout = SnapshotLayout(sources, HOST, crosses_bus=crosses_bus)
    assert layout.unpackable == []
    assert bool(layout.packs) == bool(layout.large) == (not layout.batches) == crosses_bus
    buffer = buffer_of(layout)
    buffer.fill(list(sources.values()), HOST)
    assert list(buffer.tensors) == list(sources)
    for name, value in sources.items():
        assert bits(buffer.tensors[name]) == bits(value), name
        assert buffer.tensors[name].shape == value.shape
    live = {n: torch.zeros_like(v) for n, v in sources.items()}
    assert live["picture"].stride() == sources["picture"].stride() != buffer.tensors["picture"].stride()
    buffer.copy_back(list(live.values()))
    assert all(bits(live[n]) == bits(v) for n, v in sources.items())


def test_checksums_start_while_the_last_tensors_are_still_crossing(monkeypatch):
    monkeypatch.setattr(layout_module, "PIECE_BYTES", 1 << 14)
    sources = {f"t{n}": torch.full((1000 + n,), float(n + 1)) for n in range(40)}
    sources |= {"few": torch.ones(3)}
    monkeypatch.setattr(layout_module, "SMALL_BYTES", 1 << 10)
    layout = SnapshotLayout(sources, HOST, crosses_bus=True)
    buffer, live = buffer_of(layout), {n: torch.zeros_like(v) for n, v in sources.items()}
    buffer.fill(list(sources.values()), HOST)
    asked: list[list[str]] = []

    def checksum(tensors: dict[str, torch.Tensor]) -> Checksums:
        asked.append(list(tensors))
        assert all(torch.equal(value, sources[name]) for name, value in tensors.items()), "these have arrived"
        assert not any(live[name].any() for name in live if name not in tensors), "no other has"
        return checksum_and_finite(tensors)

    results = buffer.copy_back(list(live.values()), checksum)
    assert asked == [["few", *(f"t{n}" for n in range(38))]]
    assert [each.names for each in results] == asked
    assert all(torch.equal(live[name], value) for name, value in sources.items())
    few = SnapshotLayout({f"t{n}": torch.zeros(4) for n in range(9)}, HOST, crosses_bus=True)
    assert not few.early, "too few bytes to be worth it"


def test_concurrent_checksums_work_without_a_gpu(monkeypatch):
    monkeypatch.setattr(layout_module, "PIECE_BYTES", 1 << 14)
    monkeypatch.setattr(layout_module, "SMALL_BYTES", 1 << 10)
    sources = {f"t{n}": torch.full((1000,), float(n + 1)) for n in range(40)}
    layout = SnapshotLayout(sources, HOST, crosses_bus=True)
    buffer, live = buffer_of(layout), {n: torch.zeros_like(v) for n, v in sources.items()}
    buffer.fill(list(sources.values()), HOST)
    copier = Copier(lambda name: None)
    with copier.concurrent_checksums() as checksum:
        (result,) = buffer.copy_back(list(live.values()), checksum)
    copier.close()
    assert (
        result.sums.tolist() == checksum_and_finite({n: sources[n] for n in result.names}).sums.tolist()
        and len(result.names) > 30
    )


def test_no_copy_crosses_a_piece_boundary_and_no_two_tensors_overlap(monkeypatch):
    monkeypatch.setattr(layout_module, "PIECE_BYTES", 1 << 16)
    monkeypatch.setattr(layout_module, "MAX_PACK_BYTES", 1 << 16)
    sources = tensors()
    layout = SnapshotLayout(sources, HOST, crosses_bus=True)
    taken: list[tuple[int, int]] = []
    for i, value in enumerate(sources.values()):
        at, size = layout.offsets[i], value.element_size()
        if i in layout.large:
            assert at % 256 == 0
            for a, b in layout.pieces(i):
                assert (at + a * size) // (1 << 16) == (at + b * size - 1) // (1 << 16)
        taken.append((at, at + value.nbytes))
    for pack in layout.packs:
        assert pack.start // (1 << 16) == (pack.start + pack.nbytes - 1) // (1 << 16)
    taken.sort()
    assert all(a[1] <= b[0] for a, b in pairwise(taken))
    assert taken[-1][1] <= layout.nbytes < sum(v.nbytes for v in sources.values()) + 300 * len(sources)


def test_a_layout_fits_while_names_shapes_dtypes_and_devices_stay(monkeypatch):
    first = {"a": torch.zeros(3), "b": torch.zeros(2, 2)}
    layout = SnapshotLayout(first, HOST)
    assert layout.fits(first, HOST)
    assert layout.fits({n: t.clone() for n, t in first.items()}, HOST)
    assert not layout.fits(first, None)
    for other in (
        {"a": torch.zeros(3)},
        {"b": torch.zeros(2, 2), "a": torch.zeros(3)},
        {**first, "b": torch.zeros(4, 1)},
        {**first, "b": torch.zeros(2, 2).half()},
        {**first, "b": torch.zeros(2, 2, device="meta")},
        {**first, "c": torch.zeros(1)},
    ):
        assert not layout.fits(other, HOST)


def test_a_sparse_tensor_has_no_place_in_a_buffer():
    layout = SnapshotLayout({"a": torch.zeros(3), "s": torch.eye(3).to_sparse()}, HOST)
    assert [layout.names[i] for i in layout.unpackable] == ["s"]
    assert list(buffer_of(layout).tensors) == ["a"]


# ---- pinned memory


@pytest.fixture
def cuda(monkeypatch):
    """Record what is registered with CUDA, on a machine without a GPU."""
    held: dict[int, int] = {}
    calls: list[str] = []

    def register(address, nbytes, device):
        calls.append(threading.current_thread().name)
        held[address] = nbytes
        return True

    monkeypatch.setattr(pinned_memory, "register", register)
    monkeypatch.setattr(pinned_memory, "unregister", lambda address, device: held.pop(address))
    return held, calls


def test_pinned_memory_has_the_exact_size_and_is_unregistered_before_it_is_freed(cuda):
    held, _ = cuda
    size = pinned_memory.MIN_REGISTERED_BYTES + 12345
    memory, warning = pinned_memory.allocate_pinned(size, HOST)
    assert warning is None
    assert memory.numel() == size
    assert int(memory.sum()) == 0
    assert held == {memory.data_ptr(): size}
    view = memory[100:200].view(torch.int32)
    del memory
    gc.collect()
    assert len(held) == 1, "a view keeps it registered"
    view.fill_(7)
    del view
    gc.collect()
    assert held == {}


def test_memory_is_registered_in_parts(cuda, monkeypatch):
    held, _ = cuda
    monkeypatch.setattr(pinned_memory, "REGISTER_BYTES", 1 << 20)
    memory, _ = pinned_memory.allocate_pinned((5 << 19) + 3, HOST)
    at = memory.data_ptr()
    assert held == {at: 1 << 20, at + (1 << 20): 1 << 20, at + (2 << 20): (1 << 19) + 3}
    del memory
    gc.collect()
    assert held == {}


def test_if_cuda_refuses_nothing_stays_registered_and_the_user_is_warned(cuda, monkeypatch):
    held, _ = cuda
    monkeypatch.setattr(pinned_memory, "REGISTER_BYTES", 1 << 20)
    register_part = pinned_memory.register
    monkeypatch.setattr(pinned_memory, "register", lambda a, n, d: len(held) < 2 and register_part(a, n, d))
    ordinary = torch.zeros

    def zeros(*size, pin_memory=False, **how):
        if pin_memory:
            raise RuntimeError("limit reached\nmore details")
        return ordinary(*size, **how)

    monkeypatch.setattr(torch, "zeros", zeros)
    memory, warning = pinned_memory.allocate_pinned(3 << 20, HOST)
    assert held == {}
    assert memory.numel() == 3 << 20
    assert warning is not None
    assert "could not pin 0.00 GB of host memory (limit reached)" in warning


# ---- the pool


def pool_of(layout, worker=None):
    made = []

    def make(of):
        made.append(threading.current_thread().name)
        return buffer_of(of)

    pool = BufferPool(make)
    pool.set_layout(layout, worker)
    return pool, made


def test_buffers_are_reused_and_those_of_another_layout_are_not():
    one, other = SnapshotLayout({"a": torch.zeros(3)}, HOST), SnapshotLayout({"a": torch.zeros(4)}, HOST)
    pool, made = pool_of(one)
    first, second = pool.acquire(), pool.acquire()
    assert (pool.count, len(made)) == (2, 2)
    pool.release(first)
    assert pool.acquire() is first
    pool.set_layout(other)
    pool.release(second)
    third = pool.acquire()
    assert third.layout is other
    assert pool.count == 3
    del second
    assert pool.count == 2, "an unreferenced buffer is freed"


def test_buffers_are_preallocated_on_the_worker_within_the_limit():
    with ThreadPoolExecutor(1, thread_name_prefix="worker") as worker:
        pool, made = pool_of(SnapshotLayout({"a": torch.zeros(3)}, HOST), worker)
        held = []
        for _ in range(5):
            pool.preallocate(4)
            assert pool.count <= 4
            if pool.has_ready():
                held.append(pool.acquire())
        assert len(held) == 4
        assert all(name.startswith("worker") for name in made)
        assert pool_module.PREALLOCATED < 4
        pool.clear()
