"""The memory of snapshots: laid out once, filled and emptied bit for bit, page-locked and given back, never too much."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from torch import nn

from holdfast.runtime.snapshots import buffer_pool as blocks_module
from holdfast.runtime.snapshots import layout as layout_module
from holdfast.runtime.snapshots import pinned_memory as pages
from holdfast.runtime.snapshots.buffer_pool import Block, Blocks
from holdfast.runtime.snapshots.copier import Copier
from holdfast.runtime.snapshots.layout import Layout
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


def block_of(layout: Layout) -> Block:
    return Block(layout, {home: torch.zeros(size, dtype=torch.uint8) for home, size in layout.sizes.items()})


@pytest.mark.parametrize("piece", [1 << 12, 1 << 18, 64 << 20])
@pytest.mark.parametrize("crossing", [False, True])
def test_a_block_holds_every_kind_of_tensor_bit_for_bit_and_gives_it_back(crossing, piece, monkeypatch):
    monkeypatch.setattr(layout_module, "PIECE", piece)
    monkeypatch.setattr(layout_module, "SMALL", 1 << 14)
    monkeypatch.setattr(layout_module, "PACKED", 1 << 12)
    sources = tensors()
    layout = Layout(sources, HOST, crossing=crossing)
    assert layout.odd == []
    assert bool(layout.packs) == bool(layout.alone) == (not layout.together) == crossing
    block = block_of(layout)
    block.fill(list(sources.values()), HOST)
    assert list(block.tensors) == list(sources)
    for name, value in sources.items():
        assert bits(block.tensors[name]) == bits(value), name
        assert block.tensors[name].shape == value.shape
    live = {n: torch.zeros_like(v) for n, v in sources.items()}
    assert live["picture"].stride() == sources["picture"].stride() != block.tensors["picture"].stride()
    block.pour(list(live.values()))
    assert all(bits(live[n]) == bits(v) for n, v in sources.items())


def test_what_is_there_is_looked_at_while_the_last_of_it_is_under_way(monkeypatch):
    monkeypatch.setattr(layout_module, "PIECE", 1 << 14)
    sources = {f"t{n}": torch.full((1000 + n,), float(n + 1)) for n in range(40)}
    sources |= {"few": torch.ones(3)}
    monkeypatch.setattr(layout_module, "SMALL", 1 << 10)
    layout = Layout(sources, HOST, crossing=True)
    block, live = block_of(layout), {n: torch.zeros_like(v) for n, v in sources.items()}
    block.fill(list(sources.values()), HOST)
    asked: list[list[str]] = []

    def beside(tensors: dict[str, torch.Tensor]) -> Checksums:
        asked.append(list(tensors))
        assert all(torch.equal(value, sources[name]) for name, value in tensors.items()), "all of these are there"
        assert not any(live[name].any() for name in live if name not in tensors), "and none of the others"
        return checksum_and_finite(tensors)

    looked = block.pour(list(live.values()), beside)
    assert asked == [["few", *(f"t{n}" for n in range(38))]]
    assert [one.names for one in looked] == asked
    assert all(torch.equal(live[name], value) for name, value in sources.items())
    few = Layout({f"t{n}": torch.zeros(4) for n in range(9)}, HOST, crossing=True)
    assert not few.early, "too little to be worth it"


def test_what_crosses_from_no_gpu_is_looked_at_as_well(monkeypatch):
    monkeypatch.setattr(layout_module, "PIECE", 1 << 14)
    monkeypatch.setattr(layout_module, "SMALL", 1 << 10)
    sources = {f"t{n}": torch.full((1000,), float(n + 1)) for n in range(40)}
    layout = Layout(sources, HOST, crossing=True)
    block, live = block_of(layout), {n: torch.zeros_like(v) for n, v in sources.items()}
    block.fill(list(sources.values()), HOST)
    copier = Copier(lambda name: None)
    with copier.beside() as beside:
        (seen,) = block.pour(list(live.values()), beside)
    copier.close()
    assert (
        seen.sums.tolist() == checksum_and_finite({n: sources[n] for n in seen.names}).sums.tolist()
        and len(seen.names) > 30
    )


def test_no_copy_crosses_a_border_between_pieces_and_no_two_tensors_share_a_byte(monkeypatch):
    monkeypatch.setattr(layout_module, "PIECE", 1 << 16)
    monkeypatch.setattr(layout_module, "PACKED", 1 << 16)
    sources = tensors()
    layout = Layout(sources, HOST, crossing=True)
    taken: list[tuple[int, int]] = []
    for i, value in enumerate(sources.values()):
        at, size = layout.offsets[i], value.element_size()
        if i in layout.alone:
            assert at % 256 == 0
            for a, b in layout.cuts(i):
                assert (at + a * size) // (1 << 16) == (at + b * size - 1) // (1 << 16)
        taken.append((at, at + value.nbytes))
    for pack in layout.packs:
        assert pack.start // (1 << 16) == (pack.start + pack.nbytes - 1) // (1 << 16)
    taken.sort()
    assert all(a[1] <= b[0] for a, b in pairwise(taken))
    assert taken[-1][1] <= layout.nbytes < sum(v.nbytes for v in sources.values()) + 300 * len(sources)


def test_a_layout_serves_while_names_shapes_types_and_places_stay(monkeypatch):
    first = {"a": torch.zeros(3), "b": torch.zeros(2, 2)}
    layout = Layout(first, HOST)
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


def test_what_is_sparse_has_no_place_in_a_block():
    layout = Layout({"a": torch.zeros(3), "s": torch.eye(3).to_sparse()}, HOST)
    assert [layout.names[i] for i in layout.odd] == ["s"]
    assert list(block_of(layout).tensors) == ["a"]


# ---- page-locked


@pytest.fixture
def cuda(monkeypatch):
    """What CUDA was asked to lock, without one."""
    held: dict[int, int] = {}
    calls: list[str] = []

    def register(address, nbytes, device):
        calls.append(threading.current_thread().name)
        held[address] = nbytes
        return True

    monkeypatch.setattr(pages, "register", register)
    monkeypatch.setattr(pages, "unregister", lambda address, device: held.pop(address))
    return held, calls


def test_locked_memory_is_exactly_as_large_as_asked_for_and_is_given_back_before_it_goes(cuda):
    held, _ = cuda
    size = pages.FEW + 12345
    memory, said = pages.locked(size, HOST)
    assert said is None
    assert memory.numel() == size
    assert int(memory.sum()) == 0
    assert held == {memory.data_ptr(): size}
    view = memory[100:200].view(torch.int32)
    del memory
    gc.collect()
    assert len(held) == 1, "a view of it is still there"
    view.fill_(7)
    del view
    gc.collect()
    assert held == {}


def test_memory_may_be_locked_in_parts(cuda, monkeypatch):
    held, _ = cuda
    monkeypatch.setattr(pages, "PART", 1 << 20)
    memory, _ = pages.locked((5 << 19) + 3, HOST)
    at = memory.data_ptr()
    assert held == {at: 1 << 20, at + (1 << 20): 1 << 20, at + (2 << 20): (1 << 19) + 3}
    del memory
    gc.collect()
    assert held == {}


def test_where_locking_is_refused_nothing_stays_locked_and_it_is_said(cuda, monkeypatch):
    held, _ = cuda
    monkeypatch.setattr(pages, "PART", 1 << 20)
    locked_so_far = pages.register
    monkeypatch.setattr(pages, "register", lambda a, n, d: len(held) < 2 and locked_so_far(a, n, d))
    ordinary = torch.zeros

    def zeros(*size, pin_memory=False, **how):
        if pin_memory:
            raise RuntimeError("no more of it\nand more words")
        return ordinary(*size, **how)

    monkeypatch.setattr(torch, "zeros", zeros)
    memory, said = pages.locked(3 << 20, HOST)
    assert held == {}
    assert memory.numel() == 3 << 20
    assert said is not None
    assert "could not be page-locked (no more of it)" in said


# ---- a pool


def pool_of(layout, worker=None):
    made = []

    def make(of):
        made.append(threading.current_thread().name)
        return block_of(of)

    pool = Blocks(make)
    pool.adopt(layout, worker)
    return pool, made


def test_blocks_are_used_again_and_those_of_another_layout_are_not():
    one, other = Layout({"a": torch.zeros(3)}, HOST), Layout({"a": torch.zeros(4)}, HOST)
    pool, made = pool_of(one)
    first, second = pool.take(), pool.take()
    assert (pool.count, len(made)) == (2, 2)
    pool.give(first)
    assert pool.take() is first
    pool.adopt(other)
    pool.give(second)
    third = pool.take()
    assert third.layout is other
    assert pool.count == 3
    del second
    assert pool.count == 2, "what nobody holds is gone"


def test_blocks_are_made_ahead_on_the_other_thread_and_never_too_many():
    with ThreadPoolExecutor(1, thread_name_prefix="pages") as worker:
        pool, made = pool_of(Layout({"a": torch.zeros(3)}, HOST), worker)
        held = []
        for _ in range(5):
            pool.prepare(4)
            assert pool.count <= 4
            if pool.ready():
                held.append(pool.take())
        assert len(held) == 4
        assert all(name.startswith("pages") for name in made)
        assert blocks_module.AHEAD < 4
        pool.clear()
