"""The kernel behind `sensing` on a GPU: everything that is sensed of a step, and the veto, in one launch.

It reads where the numbers are from page-locked memory and writes them back there, so that nothing else has to be sent.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.runtime.tensors.cuda_streams import current_stream

MOST_SAMPLES = 16
_BLOCK = 1024
_LOSS, _NORM, _FOUND, _SCALE, _MOST_LOSS, _MOST_NORM, _CLIP, _GRADIENTS = range(8)
_NUMBERS = 64
"""of eight bytes; the first half is what goes in, single numbers in the second come out"""
_OUT = 4
"""single numbers that come out before those of the samples"""
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_FIELDS = 7


@triton.jit
def _number(address):  # type: ignore[no-untyped-def]
    return tl.load(tl.load(address).to(tl.pointer_type(tl.float32)))


@triton.jit  # type: ignore[untyped-decorator]
def _elements(address, at, here, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    if KIND == 0:
        return tl.load(address.to(tl.pointer_type(tl.float32)) + at, mask=here, other=0.0)
    if KIND == 1:
        return tl.load(address.to(tl.pointer_type(tl.bfloat16)) + at, mask=here, other=0.0).to(tl.float32)
    return tl.load(address.to(tl.pointer_type(tl.float16)) + at, mask=here, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _sense(  # type: ignore[no-untyped-def]
    place,
    answers,
    table,
    FOUND: tl.constexpr,
    GRADIENT: tl.constexpr,
    MOMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    given = place.to(tl.pointer_type(tl.int64))
    out = (place + 256).to(tl.pointer_type(tl.float32))
    sample = tl.program_id(0) - 1
    if sample < 0:
        loss, norm = _number(given), _number(given + 1)
        limits = place.to(tl.pointer_type(tl.float64))
        most_loss, most_norm = tl.load(limits + 4).to(tl.float32), tl.load(limits + 5).to(tl.float32)
        # Not "above": NaN is not at most anything.
        high_loss = (loss <= most_loss) & (loss >= -3.4028234663852886e38)
        high_norm = (norm <= most_norm) & (norm >= -3.4028234663852886e38)
        if FOUND:  # a norm that the loss scaler has found out about is not for us
            found = _number(given + 2)
            high_norm = high_norm | (found > 0.0)
            tl.store(out + 2, found)
            tl.store(out + 3, _number(given + 3))
        tl.store(out, loss)
        tl.store(out + 1, norm)
        lands = tl.where(high_loss & high_norm, 1.0, 0.0)
        tl.store(answers, 1.0 - lands)
        tl.store(answers + 1, lands)
        # To the bit what clipping comes to in torch: `reciprocal`, rounded, times the limit.
        factor = tl.div_rn(1.0, norm + 1e-6) * tl.load(limits + 6).to(tl.float32)
        tl.store(answers + 2, tl.where(factor > 1.0, 1.0, factor))
    else:
        entry = table + sample * 7
        gradient, moment, steps = tl.load(given + 7 + sample), tl.load(entry), tl.load(entry + 1)
        count, width, stride = tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 4)
        floor = tl.load(entry + 5).to(tl.float64, bitcast=True).to(tl.float32)
        decay = tl.load(entry + 6).to(tl.float64, bitcast=True).to(tl.float32)
        counted = tl.load(steps.to(tl.pointer_type(tl.float32)), mask=steps != 0, other=0.0)
        share = tl.where(counted > 0.0, 1.0 - tl.exp2(decay * counted), 1.0)
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, count, BLOCK):
            place_of = start + tl.arange(0, BLOCK)
            here = place_of < count
            at = (place_of // width) * stride + place_of % width
            g = _elements(gradient, at, here, GRADIENT)
            v = _elements(moment, at, here, MOMENT)
            total += g * g / tl.maximum(v / share, floor)
        tl.store(out + 4 + sample, tl.sum(total))


_built: dict[tuple[Any, ...], Any] = {}


def _launch(stream: torch.cuda.Stream, programs: int, *given: Any) -> None:
    """On the current stream. A variant that is built already is launched without Triton's way of finding out which it is:
    what differs from step to step, the first three, is always of the same kind and aligned alike."""
    variant = stream.device_index, *given[3:]
    built = _built.get(variant)
    if built is None:
        _built[variant] = _sense[(programs,)](*given, num_warps=4)
    else:
        built[(programs, 1, 1)](*given, stream=stream.cuda_stream)


class Place:
    """Page-locked memory for one step: where its numbers are, then the numbers."""

    def __init__(self) -> None:
        self._memory = torch.zeros(_NUMBERS, dtype=torch.int64, pin_memory=True)
        self._address = self._memory.data_ptr()
        self._given = (ctypes.c_int64 * (_NUMBERS // 2)).from_address(self._address)
        self._limits = (ctypes.c_double * (_NUMBERS // 2)).from_address(self._address)
        self._out = (ctypes.c_float * _NUMBERS).from_address(self._address + 8 * (_NUMBERS // 2))
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._count = 0
        self._no_table: Tensor | None = None
        self._sent = False

    def send(
        self,
        loss: Tensor,
        norm: Tensor,
        scaled: tuple[Tensor, Tensor] | None,
        limits: tuple[float, float],
        clip: float | None,
        gradients: Sequence[Tensor],
        samples: Samples | None,
        answers: Tensor,
    ) -> None:
        """`scaled`: what the loss scaler found, and its scale. The caller sees to it that `fits` all of them. `answers`: the
        veto; its opposite; what gradients are multiplied by to be clipped, where `clip` is given."""
        given = self._given
        given[_LOSS], given[_NORM] = loss.data_ptr(), norm.data_ptr()
        self._limits[_MOST_LOSS], self._limits[_MOST_NORM] = limits
        self._limits[_CLIP] = 1.0 if clip is None else clip
        if scaled is not None:
            given[_FOUND], given[_SCALE] = scaled[0].data_ptr(), scaled[1].data_ptr()
        for n, g in enumerate(gradients, _GRADIENTS):
            given[n] = g.data_ptr()
        self._count = count = len(gradients)
        if samples is None and self._no_table is None:
            self._no_table = torch.zeros(_FIELDS, dtype=torch.int64, device=answers.device)
        table, kinds = (self._no_table, (0, 0)) if samples is None else (samples.table, samples.kinds)
        stream = current_stream(answers.device)
        _launch(stream, 1 + count, self._address, answers, table, scaled is not None, *kinds, _BLOCK)
        self.event.record(stream)
        self._sent = True

    def read(self) -> list[float]:
        """Loss, norm, what was found, scale, and the sum of squares of each sample."""
        self.event.synchronize()
        self._sent = False
        return list(self._out[: _OUT + self._count])

    def __del__(self) -> None:
        """Nobody has read it: the kernel may still be to come, and knows nothing but the address."""
        if self._sent and not sys.is_finalizing():
            with contextlib.suppress(Exception):
                self.event.synchronize()


Row = tuple[Tensor, Tensor | None, int, int, int, float, float]
"""the moment's elements, the step count if they are to be corrected by it, how many there are, how many lie in a row and how
far rows are apart, eps squared, and log2 of the moment's decay"""


class Samples:
    """What does not change from step to step of the elements that are looked at."""

    def __init__(self, rows: Sequence[Row], g: torch.dtype) -> None:
        self.rows = rows
        self.kinds = _KINDS[g], _KINDS[rows[0][0].dtype]
        words = torch.zeros(len(rows), _FIELDS, dtype=torch.int64)
        for n, (v, step, count, width, stride, floor, decay) in enumerate(rows):
            words[n, 0], words[n, 1] = v.data_ptr(), 0 if step is None else step.data_ptr()
            words[n, 2], words[n, 3], words[n, 4] = count, width, stride
            words[n, 5:] = torch.tensor([floor, decay], dtype=torch.float64).view(torch.int64)
        self.table = words.pin_memory().to(rows[0][0].device, non_blocking=True)


def fits(device: torch.device, *numbers: Tensor) -> bool:
    """Whether the kernel can read them as they are: single numbers of four bytes on that device."""
    for n in numbers:  # noqa: SIM110, every step
        if n.dtype is not torch.float32 or n.numel() != 1 or n.device != device:
            return False
    return True


def known(dtype: torch.dtype) -> bool:
    return dtype in _KINDS
