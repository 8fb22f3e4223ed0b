"""Checksums of many tensors in one call equal `bit_checksum` of each, for every dtype and memory layout."""

from __future__ import annotations

import math

import pytest
import torch

from holdfast.runtime.tensors import checksum
from holdfast.runtime.tensors.checksum import checksum_and_finite
from holdfast.runtime.tensors.inspect import bit_checksum

HOST = torch.device("cpu")
TENSORS = {
    "matrix": torch.randn(37, 11),
    "odd": torch.randn(7),
    "one": torch.tensor(3.5),
    "two": torch.tensor(-0.0),
    "count": torch.tensor(7),
    "bf16": torch.randn(9).bfloat16(),
    "fp16": torch.randn(5).half(),
    "double": torch.randn(3).double(),
    "whole": torch.arange(-5, 5, dtype=torch.int32),
    "mask": torch.tensor([True, False, True]),
    "complex": torch.randn(4, dtype=torch.complex64),
    "none": torch.empty(0, 3),
    "across": torch.randn(6, 4).T,
    "slice": torch.randn(64)[1:34],
    "float8": torch.randn(16).to(torch.float8_e4m3fn),
    "sparse": torch.tensor([[0.0, 2.0], [0.0, 0.0]]).to_sparse(),
    "nan": torch.tensor([1.0, math.nan, 2.0]),
}


def test_the_sums_equal_bit_checksum():
    seen = checksum_and_finite(TENSORS)
    assert seen.names == list(TENSORS)
    assert seen.sums.tolist() == [int(bit_checksum(value)) for value in TENSORS.values()]


def test_a_tensor_with_nan_is_never_reported_finite():
    seen = checksum_and_finite(TENSORS)
    assert seen.maybe_nonfinite[seen.names.index("nan")] == 1


@pytest.mark.parametrize("name", ["matrix", "odd", "one", "bf16", "double", "whole", "slice", "across"])
def test_one_flipped_bit_changes_one_checksum(name):
    before = checksum_and_finite(TENSORS)
    changed = {n: t.clone() for n, t in TENSORS.items()}
    value = changed[name].T if name == "across" else changed[name]
    value.reshape(-1).view(torch.uint8)[-1] ^= 4
    after = checksum_and_finite(changed)
    differ = [n for n, a, b in zip(before.names, before.sums.tolist(), after.sums.tolist(), strict=True) if a != b]
    assert differ == [name]


def test_no_tensors_give_empty_results():
    seen = checksum_and_finite({})
    assert (seen.names, seen.sums.tolist(), seen.maybe_nonfinite.tolist()) == ([], [], [])


def test_the_address_table_is_cached_while_tensors_stay_in_place(monkeypatch):
    made = []
    monkeypatch.setattr(checksum, "_tables", {})
    monkeypatch.setattr(checksum, "_make_table", lambda values, device: made.append(values) or object())
    values = [torch.zeros(8), torch.zeros(4, 6).T, torch.zeros(3, dtype=torch.complex64)]
    for _ in range(3):
        checksum._table_for(values, HOST)
    assert len(made) == 1, "tensors that the kernel does not support do not prevent caching"
    for other in (
        torch.zeros(8),
        values[0].view(2, 4)[:1],
        values[0].view(torch.int32),
        values[0].as_strided((8,), (0,)),
    ):
        before = len(made)
        checksum._table_for([other, *values[1:]], HOST)
        assert len(made) == before + 1
    for _ in range(2):
        before = len(made)
        checksum._table_for([*values, torch.eye(2).to_sparse()], HOST)
        assert len(made) == before + 1, "a tensor without an address cannot be cached"
