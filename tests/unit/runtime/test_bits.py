"""One look at many tensors: the sums are what `bit_checksum` says of each, wherever and however they lie."""

from __future__ import annotations

import math

import pytest
import torch

from holdfast.runtime.tensors import checksum as bits
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


def test_the_sums_are_the_fingerprints():
    seen = checksum_and_finite(TENSORS)
    assert seen.names == list(TENSORS)
    assert seen.sums.tolist() == [int(bit_checksum(value)) for value in TENSORS.values()]


def test_nobody_is_called_finite_who_is_not():
    seen = checksum_and_finite(TENSORS)
    assert seen.bad[seen.names.index("nan")] == 1


@pytest.mark.parametrize("name", ["matrix", "odd", "one", "bf16", "double", "whole", "slice", "across"])
def test_one_flipped_bit_changes_one_sum(name):
    before = checksum_and_finite(TENSORS)
    changed = {n: t.clone() for n, t in TENSORS.items()}
    value = changed[name].T if name == "across" else changed[name]
    value.reshape(-1).view(torch.uint8)[-1] ^= 4
    after = checksum_and_finite(changed)
    differ = [n for n, a, b in zip(before.names, before.sums.tolist(), after.sums.tolist(), strict=True) if a != b]
    assert differ == [name]


def test_nothing_to_look_at_is_nothing_seen():
    seen = checksum_and_finite({})
    assert (seen.names, seen.sums.tolist(), seen.bad.tolist()) == ([], [], [])


def test_where_tensors_lie_is_worked_out_once_for_as_long_as_they_lie_there(monkeypatch):
    made = []
    monkeypatch.setattr(bits, "_tables", {})
    monkeypatch.setattr(bits, "_table", lambda values, device: made.append(values) or object())
    values = [torch.zeros(8), torch.zeros(4, 6).T, torch.zeros(3, dtype=torch.complex64)]
    for _ in range(3):
        bits._known(values, HOST)
    assert len(made) == 1, "those that are looked at one by one are no reason to ask again"
    for other in (
        torch.zeros(8),
        values[0].view(2, 4)[:1],
        values[0].view(torch.int32),
        values[0].as_strided((8,), (0,)),
    ):
        before = len(made)
        bits._known([other, *values[1:]], HOST)
        assert len(made) == before + 1
    for _ in range(2):
        before = len(made)
        bits._known([*values, torch.eye(2).to_sparse()], HOST)
        assert len(made) == before + 1, "what has no address may be anywhere"
