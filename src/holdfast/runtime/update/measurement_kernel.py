"""The Triton kernel of `fused_measurements`.

It reads the addresses of its inputs from pinned memory and writes its outputs back there, so that nothing else is copied.
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

from holdfast.runtime.update.veto import FLOAT32_MAX, Slot

MAX_SAMPLES = 16
_BLOCK = 1024
_WORDS = 64
"""8-byte words of a step's buffer: the first half holds inputs, the second half float32 outputs"""
_OUTPUTS = 4
"""outputs before the sums of the samples"""
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_COLUMNS = 7

# Words of the input half. The first four are addresses, the limits and max_norm are float64, and addresses of gradients
# follow. Outputs have the same slots. Triton reads only globals that are constexpr.
_LOSS = tl.constexpr(int(Slot.LOSS))
_GRAD_NORM = tl.constexpr(int(Slot.GRAD_NORM))
_FOUND_INF = tl.constexpr(int(Slot.FOUND_INF))
_LOSS_SCALE = tl.constexpr(int(Slot.LOSS_SCALE))
_LOSS_LIMIT = tl.constexpr(int(Slot.LOSS_LIMIT))
_GRAD_NORM_LIMIT = tl.constexpr(int(Slot.GRAD_NORM_LIMIT))
_MAX_NORM = tl.constexpr(6)
_GRADIENTS = tl.constexpr(7)
_OUTPUT_BYTES = tl.constexpr(8 * (_WORDS // 2))
_FIRST_SUM = tl.constexpr(_OUTPUTS)
_ROW = tl.constexpr(_COLUMNS)
_MOST_NEGATIVE = tl.constexpr(-FLOAT32_MAX)


@triton.jit
def _load_float(address):  # type: ignore[no-untyped-def]
    return tl.load(tl.load(address).to(tl.pointer_type(tl.float32)))


@triton.jit  # type: ignore[untyped-decorator]
def _load_elements(address, at, mask, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    if DTYPE == 0:
        return tl.load(address.to(tl.pointer_type(tl.float32)) + at, mask=mask, other=0.0)
    if DTYPE == 1:
        return tl.load(address.to(tl.pointer_type(tl.bfloat16)) + at, mask=mask, other=0.0).to(tl.float32)
    return tl.load(address.to(tl.pointer_type(tl.float16)) + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _is_acceptable(value, limit):  # type: ignore[no-untyped-def]
    # The rule of `veto.py`. NaN fails both comparisons.
    return (value <= limit) & (value >= _MOST_NEGATIVE)


@triton.jit  # type: ignore[untyped-decorator]
def _measure(  # type: ignore[no-untyped-def]
    buffer,
    results,
    table,
    HAS_SCALER: tl.constexpr,
    GRADIENT: tl.constexpr,
    MOMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    inputs = buffer.to(tl.pointer_type(tl.int64))
    outputs = (buffer + _OUTPUT_BYTES).to(tl.pointer_type(tl.float32))
    sample = tl.program_id(0) - 1
    if sample < 0:
        loss, norm = _load_float(inputs + _LOSS), _load_float(inputs + _GRAD_NORM)
        numbers = buffer.to(tl.pointer_type(tl.float64))
        loss_ok = _is_acceptable(loss, tl.load(numbers + _LOSS_LIMIT).to(tl.float32))
        norm_ok = _is_acceptable(norm, tl.load(numbers + _GRAD_NORM_LIMIT).to(tl.float32))
        if HAS_SCALER:  # a norm that the loss scaler reports is not vetoed
            found_inf = _load_float(inputs + _FOUND_INF)
            norm_ok = norm_ok | (found_inf > 0.0)
            tl.store(outputs + _FOUND_INF, found_inf)
            tl.store(outputs + _LOSS_SCALE, _load_float(inputs + _LOSS_SCALE))
        tl.store(outputs + _LOSS, loss)
        tl.store(outputs + _GRAD_NORM, norm)
        tl.store(results, tl.where(loss_ok & norm_ok, 0.0, 1.0))
        # Bit for bit torch's clip factor: `reciprocal`, rounded, times the limit.
        factor = tl.div_rn(1.0, norm + 1e-6) * tl.load(numbers + _MAX_NORM).to(tl.float32)
        tl.store(results + 1, tl.where(factor > 1.0, 1.0, factor))
    else:
        row = table + sample * _ROW
        gradient, moment, step = tl.load(inputs + _GRADIENTS + sample), tl.load(row), tl.load(row + 1)
        count, length, stride = tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
        floor = tl.load(row + 5).to(tl.float64, bitcast=True).to(tl.float32)
        log2_beta2 = tl.load(row + 6).to(tl.float64, bitcast=True).to(tl.float32)
        steps = tl.load(step.to(tl.pointer_type(tl.float32)), mask=step != 0, other=0.0)
        correction = tl.where(steps > 0.0, 1.0 - tl.exp2(log2_beta2 * steps), 1.0)
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, count, BLOCK):
            index = start + tl.arange(0, BLOCK)
            mask = index < count
            at = (index // length) * stride + index % length
            g = _load_elements(gradient, at, mask, GRADIENT)
            v = _load_elements(moment, at, mask, MOMENT)
            total += g * g / tl.maximum(v / correction, floor)
        tl.store(outputs + _FIRST_SUM + sample, tl.sum(total))


_built: dict[tuple[Any, ...], Any] = {}


def _launch(stream: torch.cuda.Stream, programs: int, *args: Any) -> None:
    """Launch on the current stream. A built variant is launched without Triton's dispatch: the first three arguments, which
    change from step to step, always have the same types and alignment."""
    variant = stream.device_index, *args[3:]
    built = _built.get(variant)
    if built is None:
        _built[variant] = _measure[(programs,)](*args, num_warps=4)
    else:
        built[(programs, 1, 1)](*args, stream=stream.cuda_stream)


class StepBuffer:
    """Holds one step's inputs and outputs in pinned memory."""

    def __init__(self) -> None:
        self._memory = torch.zeros(_WORDS, dtype=torch.int64, pin_memory=True)
        self._address = self._memory.data_ptr()
        half = _WORDS // 2
        self._addresses = (ctypes.c_int64 * half).from_address(self._address)
        self._numbers = (ctypes.c_double * half).from_address(self._address)
        self._outputs = (ctypes.c_float * _WORDS).from_address(self._address + 8 * half)
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._count = 0
        self._empty_table: Tensor | None = None
        self._in_flight = False

    def send(
        self,
        loss: Tensor,
        grad_norm: Tensor,
        scaler: tuple[Tensor, Tensor] | None,
        limits: tuple[float, float],
        max_norm: float | None,
        gradients: Sequence[Tensor],
        table: SampleTable | None,
        results: Tensor,
    ) -> None:
        """Launch the kernel. The caller has checked that it `can_read` the tensors.

        `scaler` holds found_inf and the loss scale. The kernel writes the veto and, with `max_norm`, the clip factor to
        `results`.
        """
        addresses, numbers = self._addresses, self._numbers
        addresses[Slot.LOSS], addresses[Slot.GRAD_NORM] = loss.data_ptr(), grad_norm.data_ptr()
        numbers[Slot.LOSS_LIMIT], numbers[Slot.GRAD_NORM_LIMIT] = limits
        numbers[_MAX_NORM.value] = 1.0 if max_norm is None else max_norm
        if scaler is not None:
            addresses[Slot.FOUND_INF], addresses[Slot.LOSS_SCALE] = scaler[0].data_ptr(), scaler[1].data_ptr()
        for n, g in enumerate(gradients, _GRADIENTS.value):
            addresses[n] = g.data_ptr()
        self._count = count = len(gradients)
        if table is None and self._empty_table is None:
            self._empty_table = torch.zeros(_COLUMNS, dtype=torch.int64, device=results.device)
        rows, dtypes = (self._empty_table, (0, 0)) if table is None else (table.rows, table.dtypes)
        stream = torch.cuda.current_stream(results.device)
        _launch(stream, 1 + count, self._address, results, rows, scaler is not None, *dtypes, _BLOCK)
        self.event.record(stream)
        self._in_flight = True

    def read(self) -> list[float]:
        """Wait for the kernel and return loss, gradient norm, found_inf, loss scale, and the sum of each sample."""
        self.event.synchronize()
        self._in_flight = False
        return list(self._outputs[: _OUTPUTS + self._count])

    def __del__(self) -> None:
        """Wait for a kernel that was never read: it knows nothing but the address, and may still write there."""
        if self._in_flight and not sys.is_finalizing():
            with contextlib.suppress(Exception):
                self.event.synchronize()


class SampleTable:
    """Holds on the device what usually does not change from step to step about the sampled elements.

    The columns of a row are: address of the moment, address of the step count or 0, number of elements, elements of a run,
    distance of runs, eps squared, log2 of beta2.
    """

    def __init__(
        self, rows: Sequence[tuple[float, ...]], gradient: torch.dtype, moment: torch.dtype, device: torch.device
    ) -> None:
        self.dtypes = _DTYPES[gradient], _DTYPES[moment]
        words = torch.zeros(len(rows), _COLUMNS, dtype=torch.int64)
        for n, (*integers, floor, log2_beta2) in enumerate(rows):
            words[n, :5] = torch.tensor(integers)
            words[n, 5:] = torch.tensor([floor, log2_beta2], dtype=torch.float64).view(torch.int64)
        self.rows = words.pin_memory().to(device, non_blocking=True)


def can_read(device: torch.device, *numbers: Tensor) -> bool:
    """Return whether each is a single float32 on `device`."""
    for n in numbers:  # noqa: SIM110, every step
        if n.dtype is not torch.float32 or n.numel() != 1 or n.device != device:
            return False
    return True


def is_known(dtype: torch.dtype) -> bool:
    return dtype in _DTYPES
