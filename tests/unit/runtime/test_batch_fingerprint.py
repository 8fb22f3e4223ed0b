"""Fingerprints and sequence lengths of batches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from holdfast.runtime.data.fingerprint import BatchFingerprint, fingerprint, sequence_length


def test_same_content_has_the_same_fingerprint_and_other_content_another():
    a, b = torch.arange(12).reshape(3, 4), torch.arange(12).reshape(3, 4)
    assert fingerprint(a) == fingerprint(b)
    b[1, 1] += 1
    assert fingerprint(a) != fingerprint(b)
    assert fingerprint({"x": a}) == fingerprint([a]) == fingerprint(a)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.int8, torch.complex64, torch.float64]
)
def test_every_dtype_has_a_fingerprint(dtype):
    a = torch.rand(6, 5).gt(0.5).to(dtype)
    assert fingerprint(a) == fingerprint(a.clone()) != fingerprint(~a.bool())


def test_the_first_two_tensors_count():
    a, b, c = (torch.full((4, 4), float(n)) for n in range(3))
    assert fingerprint((a, b, c)) == fingerprint((a, b, a)) != fingerprint((a, c, c))


def test_large_batch_is_sampled_from_its_first_byte_to_its_last():
    big = torch.zeros(64, 4096, dtype=torch.int64)
    known = fingerprint(big)
    for place in ((0, 0), (63, 4095)):
        other = big.clone()
        other[place] = 7
        assert fingerprint(other) != known
    other = big.clone()
    other[:, 1000:] = 3
    assert fingerprint(other) != known


@pytest.mark.parametrize("batch", [torch.zeros(2, 2, device="meta"), {"a": 3}, [], "text", None])
def test_batch_outside_host_memory_has_no_fingerprint(batch):
    assert fingerprint(batch) is None


def test_tensor_that_is_not_contiguous_or_requires_grad_has_a_fingerprint():
    a = torch.arange(24.0).reshape(4, 6)
    assert fingerprint(a.t()) is not None
    assert fingerprint(torch.arange(1000.0)[::3]) is not None
    assert fingerprint(nn.Parameter(a)) == fingerprint(a)
    assert fingerprint(torch.zeros(0, 4)) == 0


def test_fingerprint_of_a_step_depends_on_the_order_of_its_batches():
    def look(*batches):
        seen = BatchFingerprint(fingerprint=True)
        for batch in batches:
            seen.add(batch)
        return seen.checksum

    a, b = torch.ones(2, 2), torch.zeros(2, 2)
    assert look(a, b) == look(a.clone(), b.clone()) != look(b, a)
    assert look(a, torch.zeros(2, 2, device="meta"), b) is None
    assert look() is None


@pytest.mark.parametrize(
    ("batch", "length"),
    [
        (torch.zeros(4, 128, dtype=torch.int64), 128),
        (torch.zeros(4, 128, dtype=torch.int32), 128),
        ({"mask": torch.ones(4, 7), "input_ids": torch.zeros(4, 64, dtype=torch.int64)}, 64),
        ({"tokens": torch.zeros(4, 32, dtype=torch.int64), "weight": torch.ones(4)}, 32),
        ((torch.zeros(4, 16, dtype=torch.int64), torch.zeros(4)), 16),
        (torch.zeros(4, 128), None),
        (torch.zeros(4, 128, dtype=torch.bool), None),
        (torch.zeros(4, 128, 3, dtype=torch.int64), None),
        (torch.zeros(4, dtype=torch.int64), None),
        ({"input_ids": [1, 2]}, None),
        ([], None),
        (None, None),
        (torch.zeros(4, 128, dtype=torch.int64, device="meta"), 128),
    ],
)
def test_sequence_length(batch, length):
    assert sequence_length(batch) == length


def test_batches_of_different_lengths_have_no_common_length():
    look = BatchFingerprint(fingerprint=False)
    look.add(torch.zeros(2, 8, dtype=torch.int64))
    assert look.sequence_length == 8
    look.add(torch.zeros(2, 9, dtype=torch.int64))
    assert (look.sequence_length, look.checksum) == (None, None)
