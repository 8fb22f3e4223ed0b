"""The host, the torch operations and (in tests/gpu) the kernel veto exactly the same steps."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.base.types import Flag
from holdfast.runtime.update.measurements import DeviceMeasurements, MeasurementPacker
from marks import examples

LARGEST = torch.finfo(torch.float32).max
VALUES = [1.0, -1.0, 5.0, 0.1, -400.0, 3e38, LARGEST, -LARGEST, math.inf, -math.inf, math.nan]
LIMITS = [None, 5.0, 4.0, -2.0, 0.1, 0.1 + 1e-9, 1e300, -1e300, math.inf, -math.inf]
OTHERS = [(1.0, None), (1.0, 0.5), (math.nan, None), (-math.inf, 5.0)]


def number(value, dtype=torch.float32):
    return None if value is None else torch.tensor(value, dtype=dtype)


def check(loss, norm, loss_limit, norm_limit, found_inf=None, differs=None, agreed=False, packer=None):
    """Compare the veto computed on the device with the host's flags, and those with the rule written out."""
    packer = packer or MeasurementPacker()
    limits = (loss_limit, norm_limit)
    if agreed:  # ranks agree on limits in float64, on the device
        limits = tuple(number(math.inf if limit is None else limit, torch.float64) for limit in limits)
    flag = None if differs is None else torch.tensor(differs)
    measured = DeviceMeasurements(number(loss), number(norm), limits, number(found_inf), grads_differ=flag)
    packed = packer.pack(measured)
    veto, read = packer.veto(measured, packed), packed.read()
    case = loss, norm, loss_limit, norm_limit, found_inf, differs, agreed
    assert veto.dtype is torch.float32 and veto.dim() == 0
    assert float(veto) == (1.0 if read.flags else 0.0), case

    def is_bad(value, limit):
        compared = limit if agreed or limit is None else float(number(limit))
        return not math.isfinite(value) or (compared is not None and float(number(value)) > max(compared, -LARGEST))

    bad_loss = is_bad(loss, loss_limit)
    overflow = bool(found_inf) and not bad_loss
    assert read.overflow == overflow, case
    assert bool(read.flags) == (not overflow and (bad_loss or is_bad(norm, norm_limit) or bool(differs))), case
    assert overflow or bool(read.flags & (Flag.LOSS_NONFINITE | Flag.LOSS_HIGH)) == bad_loss, case


@pytest.mark.parametrize("agreed", [False, True])
@pytest.mark.parametrize("found_inf", [None, 0.0, 1.0])
def test_edge_values_are_vetoed_alike(found_inf, agreed):
    packer = MeasurementPacker()
    for value, limit, (other, other_limit) in itertools.product(VALUES, LIMITS, OTHERS):
        check(value, other, limit, other_limit, found_inf, agreed=agreed, packer=packer)
        check(other, value, other_limit, limit, found_inf, agreed=agreed, packer=packer)


@pytest.mark.parametrize("differs", [False, True])
@pytest.mark.parametrize("found_inf", [None, 0.0, 1.0])
def test_ranks_whose_gradients_differ_are_vetoed_unless_the_scaler_reports_the_gradients(found_inf, differs):
    for loss, norm in itertools.product((1.0, math.nan), repeat=2):
        check(loss, norm, None, None, found_inf, differs, agreed=True)


single = st.floats(width=32)
limit = st.none() | st.floats(allow_nan=False)
flag = st.sampled_from([None, 0.0, 1.0])


@settings(max_examples=examples(300))
@given(loss=single, norm=single, loss_limit=limit, norm_limit=limit, found_inf=flag, differs=flag, agreed=st.booleans())
def test_random_values_are_vetoed_alike(loss, norm, loss_limit, norm_limit, found_inf, differs, agreed):
    check(loss, norm, loss_limit, norm_limit, found_inf, differs, agreed)
