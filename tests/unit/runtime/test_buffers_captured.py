"""Buffer captures are exact for every kind of buffer, take few operations, and follow what forward does."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operations import Operations
from torch import Tensor, nn

from holdfast.runtime.state.buffers import _SMALL_BYTES, _STABLE_CAPTURES, ModuleBuffers
from marks import examples

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.uint16, torch.float8_e4m3fn, torch.float8_e5m2),
]


class Holder(nn.Module):
    def __init__(self, **buffers: Tensor | None) -> None:
        super().__init__()
        for name, value in buffers.items():
            self.register_buffer(name, value)


def settled(*modules: nn.Module) -> ModuleBuffers:
    """Return buffers that have been in place long enough to be copied together."""
    buffers = ModuleBuffers([(f"m{i}", m) for i, m in enumerate(modules)])
    for _ in range(_STABLE_CAPTURES + 2):
        buffers.capture()
    return buffers


def bits(value: Tensor | None) -> Any:
    if value is None:
        return None
    raw = value.detach().clone().contiguous().reshape(-1).view(torch.uint8)
    return value.dtype, tuple(value.shape), bytes(raw.numpy())


# ---- few operations


def test_the_buffers_of_fifty_batch_norms_are_copied_in_one_operation_per_dtype():
    model = nn.Sequential(*[nn.BatchNorm2d(8) for _ in range(50)])
    buffers = settled(model)
    with Operations() as seen:
        buffers.capture()
    assert sorted(seen.names) == ["aten.cat.default", "aten.stack.default"]


def test_no_buffers_take_no_operation():
    buffers = settled(nn.Linear(2, 2))
    with Operations() as seen:
        captured = buffers.capture()
    assert seen.names == [] and captured.tensors() == []
    buffers.restore(captured)


def test_a_large_buffer_that_has_not_changed_is_not_copied_again():
    holder = Holder(large=torch.randn(_SMALL_BYTES // 4 + 1), small=torch.randn(_SMALL_BYTES // 4))
    buffers = settled(holder)
    first, second = buffers.capture().tensors(), buffers.capture().tensors()
    assert first[0].data_ptr() == second[0].data_ptr() != holder.large.data_ptr()
    assert first[1].data_ptr() != second[1].data_ptr()
    holder.large[0] = 7.0
    third = buffers.capture().tensors()
    assert third[0][0] == 7.0 and first[0][0] != 7.0


# ---- every kind


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (5,), (2, 3), (0, 4), (2, 1, 3)], ids=str)
def test_every_dtype_and_shape_is_restored_bit_for_bit(dtype, shape):
    generator = torch.Generator().manual_seed(3)
    size = torch.empty(shape, dtype=dtype).element_size()
    several = []
    for _ in range(3):
        raw = torch.randint(
            0, 2 if dtype is torch.bool else 256, (*shape, size), generator=generator, dtype=torch.uint8
        )
        several.append(raw.squeeze(-1).bool() if dtype is torch.bool else raw.view(dtype).reshape(shape))
    holder = Holder(a=several[0].clone(), b=several[1].clone(), c=several[2].clone(), other=torch.ones(2))
    buffers = settled(holder)
    captured = buffers.capture()
    for name in ("a", "b", "c"):
        getattr(holder, name).zero_()
    buffers.capture()
    buffers.restore(captured)
    assert [bits(getattr(holder, n)) for n in ("a", "b", "c")] == [bits(v) for v in several]


def test_nan_and_minus_zero_are_restored_bit_for_bit():
    value = (
        torch.tensor([0x7FC00001, 0x7F800001, -0x80000000, 1], dtype=torch.int64).to(torch.int32).view(torch.float32)
    )
    holder = Holder(a=value.clone(), b=value.clone())
    buffers = settled(holder)
    captured = buffers.capture()
    holder.a.zero_()
    buffers.restore(captured)
    assert bits(holder.a) == bits(value)


def test_a_non_contiguous_buffer_keeps_its_strides_if_it_is_rebound():
    holder = Holder(a=torch.arange(6.0).view(2, 3).t(), b=torch.arange(6.0).view(2, 3), c=torch.ones(8)[::2])
    buffers = settled(holder)
    captured = buffers.capture()
    before = {n: b.clone() for n, b in holder.named_buffers()}
    holder.a = torch.zeros(1)
    holder.b.zero_()
    holder.c.zero_()
    buffers.restore(captured)
    assert holder.a.stride() == (1, 3)
    for name, value in holder.named_buffers():
        assert torch.equal(value, before[name]), name


def test_inference_tensors_are_copied_and_restored():
    with torch.inference_mode():
        value, other = torch.arange(4.0), torch.arange(3.0)
    holder = Holder(a=value, b=other)
    buffers = settled(holder)
    captured = buffers.capture()
    with torch.inference_mode():
        value.zero_()
    with torch.inference_mode():
        buffers.restore(captured)
    assert holder.a.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_sparse_buffer_and_one_that_requires_grad_are_copied():
    sparse = torch.eye(3).to_sparse()
    holder = Holder(a=sparse, b=torch.ones(3, requires_grad=True), c=torch.ones(3))
    buffers = settled(holder)
    captured = buffers.capture().tensors()
    assert captured[0].is_sparse and torch.equal(captured[0].to_dense(), torch.eye(3))
    assert captured[1].tolist() == [1.0] * 3 and not captured[1].requires_grad


# ---- whatever happens to them


def test_a_write_through_data_is_copied():
    holder = Holder(a=torch.zeros(3), b=torch.zeros(3))
    buffers = settled(holder)
    holder.a.data.fill_(2.0)
    assert buffers.capture().tensors()[0].tolist() == [2.0] * 3


def test_a_new_shape_or_dtype_through_data_is_followed():
    holder = Holder(a=torch.zeros(2), b=torch.zeros(4), c=torch.zeros(2))
    buffers = settled(holder)
    before = buffers.capture()
    holder.a.data, holder.b.data = torch.arange(4.0), torch.arange(2.0)  # as many values in all as before
    held = buffers.capture().tensors()
    assert [held[0].tolist(), held[1].tolist()] == [[0.0, 1.0, 2.0, 3.0], [0.0, 1.0]]
    holder.c.data = torch.ones(2, dtype=torch.float16)
    captured = buffers.capture()
    assert captured.tensors()[2].dtype is torch.float16
    buffers.restore(before)
    assert [b.tolist() for b in holder.buffers()] == [[0.0] * 2, [0.0] * 4, [0.0] * 2]
    assert holder.c.dtype is torch.float32


def test_a_buffer_that_disappears_and_comes_back_is_followed():
    holder = Holder(a=torch.ones(3), b=torch.ones(3))
    buffers = settled(holder)
    there = buffers.capture()
    holder.a = None
    gone = buffers.capture()
    assert gone.tensors()[0] is None and buffers.as_named(gone) == {"m0.b": pytest.approx(torch.ones(3))}
    buffers.restore(there)
    assert holder.a.tolist() == [1.0] * 3
    buffers.restore(gone)
    assert holder.a is None
    del holder._buffers["b"]
    assert buffers.capture().tensors() == [None, None]


def test_a_replaced_buffer_is_not_kept_alive():
    holder = Holder(a=torch.ones(3), b=torch.ones(3))
    buffers = settled(holder)
    old = weakref.ref(holder.a)
    holder.a = torch.zeros(3)
    buffers.capture()
    gc.collect()
    assert old() is None


def test_as_named_and_from_named_round_trip():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    buffers = settled(model)
    model(torch.randn(4, 3))
    named = {n: v.clone() for n, v in buffers.as_named(buffers.capture()).items()}
    assert named.keys() == {f"m0.{n}" for n, _ in model.named_buffers()}
    before = {n: b.clone() for n, b in model.named_buffers()}
    model(torch.randn(4, 3))
    buffers.restore(buffers.from_named(named))
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())


DEEDS = ("write", "data", "rebind", "other shape", "none", "grow", "nothing", "nothing", "nothing", "restore")


@settings(max_examples=examples(150))
@given(st.lists(st.tuples(st.sampled_from(DEEDS), st.integers(0, 5)), max_size=20))
def test_captures_equal_clones_after_any_sequence_of_changes(course):
    holder = Holder(
        a=torch.zeros(3), b=torch.zeros(3), c=torch.zeros(()), d=torch.zeros((2, 2)), e=torch.zeros((), dtype=torch.int64),
        f=torch.zeros(_SMALL_BYTES // 4 + 2),
    )  # fmt: skip
    names = list(holder._buffers)
    buffers, taken = settled(holder), []
    for number, (deed, which) in enumerate(course, 1):
        name = names[which]
        value = holder._buffers[name]
        if deed == "none":
            holder._buffers[name] = None
        elif deed == "restore" and taken:
            captured, truth = taken[which % len(taken)]
            buffers.restore(captured)
            assert [bits(v) for v in holder._buffers.values()] == truth
        elif deed == "rebind" or value is None:
            holder._buffers[name] = torch.full((3,), float(number))
        elif deed == "write" or name == "f":  # through `.data` a large one is not followed
            value.add_(number)
        elif deed == "data":
            value.data.fill_(number)
        elif deed == "other shape":
            value.data = torch.full((1 + number % 4,), number, dtype=value.dtype)
        elif deed == "grow":
            value.resize_(7).fill_(number)
        taken.append((buffers.capture(), [bits(v) for v in holder._buffers.values()]))
        for captured, truth in taken:  # and none was changed by what came after it
            assert [bits(v) for v in captured.tensors()] == truth
