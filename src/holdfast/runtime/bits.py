"""One look at many tensors where they lie: a sum over the bits of each, and whether all its values are finite.

On CUDA one kernel reads everything once, at the speed of memory, however many tensors there are. Where Triton is not there,
and on the CPU, torch's own operations say the same. Nothing here waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.runtime.kernels import Kernel
from holdfast.runtime.members import PLAIN, part_of
from holdfast.runtime.snapshots.certify import fingerprint

_PIECE = 1 << 16
"""words of eight bytes that one program of the kernel reads"""
_KEPT = 4
_LANES = {
    torch.float32: "32",
    torch.float64: "64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


class Seen(NamedTuple):
    """One number a tensor, in the order of `names`, on the tensors' device."""

    names: list[str]
    sums: Tensor
    """the same as `fingerprint` says of each, or of a copy of it anywhere"""
    bad: Tensor
    """0: every value is finite; 1: it may hold NaN or Inf, or nobody has looked"""


@torch.no_grad()
def look(tensors: Mapping[str, Tensor], *, finite: bool = True) -> Seen:
    """Enqueued on the current stream. All tensors are on one device. `finite`: whether anybody wants to know."""
    parts = {name: part_of(value) for name, value in tensors.items()}
    device = next((part.device for part in parts.values()), torch.device("cpu"))
    if device.type == "cuda" and (kernel := KERNEL.on(device)) is not None:
        try:
            return _at_one_stroke(parts, device, kernel)
        except _NotBuilt as error:  # another variant of the kernel
            KERNEL.give_up(error)
    return _one_by_one(parts, device, finite)


def _one_by_one(parts: dict[str, Tensor], device: torch.device, finite: bool) -> Seen:
    names, values = list(parts), list(parts.values())
    if not names:
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        return Seen(names, nothing, nothing)
    sums: dict[int, Tensor] = {}
    for kind in (torch.float32, torch.int64):  # single numbers, of which optimizers have one a parameter, together
        single = [i for i, value in enumerate(values) if value.dim() == 0 and value.dtype is kind]
        if single:
            stacked = torch.stack([values[i] for i in single])
            if kind is torch.float32:  # as bytes, like all that does not fill a word
                stacked = stacked.view(torch.uint8).view(len(single), -1).sum(1, dtype=torch.int64)
            sums.update(zip(single, stacked.unbind(), strict=True))
    together = torch.stack([sums[i] if i in sums else _sum(value) for i, value in enumerate(values)])
    bad = torch.ones(len(names), dtype=torch.int64, device=device)
    # A norm may overflow where every value is finite: then it says "may".
    normed = [i for i, value in enumerate(values) if value.dtype in _LANES and value.layout is torch.strided]
    if finite and normed and device.type != "cpu":
        norms = torch.stack([n.double() for n in torch._foreach_norm([values[i] for i in normed])])
        places = torch.tensor(normed).to(device, non_blocking=True)
        bad.index_copy_(0, places, (~norms.isfinite()).to(torch.int64))
    return Seen(names, together, bad)


def _sum(value: Tensor) -> Tensor:
    """`fingerprint`, by the shortest way where the memory allows it: launching costs more than summing."""
    size = value.element_size()
    words = value.layout is torch.strided and value.is_contiguous() and value.numel() > 0
    if words and value.numel() * size % 8 == value.storage_offset() * size % 8 == 0 and value.dtype.is_floating_point:
        return value.view(-1).view(torch.int64).sum()
    return fingerprint(value)


# ---- at one stroke


class _Table(NamedTuple):
    """Where the tensors lie, cut into pieces: by kind of number, rows of address, words, bytes after them, place."""

    rows: list[tuple[str, Tensor]]
    there: torch.cuda.Event
    """when the rows are on the device"""
    rest: list[int]
    """the tensors that do not lie in words, or whose numbers the kernel does not know: looked at one by one"""


_tables: dict[tuple[Any, ...], _Table] = {}


def _at_one_stroke(parts: dict[str, Tensor], device: torch.device, kernel: Callable[..., None]) -> Seen:
    values = list(parts.values())
    plain = [v for v in values if type(v) in PLAIN and v.layout is torch.strided]  # what wraps others has no address
    about = [(v.numel(), v.dtype, v.is_contiguous()) for v in plain]
    key = (device.index, len(values), *[v.data_ptr() for v in plain], *about)
    table = _tables.pop(key, None)
    if table is None:
        table = _table(values, device)
        for old in list(_tables)[: 1 - _KEPT]:
            _tables.pop(old, None)
    if not table.rest:
        _tables[key] = table
    found = torch.zeros(2, len(values), dtype=torch.int64, device=device)
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream()
        stream.wait_event(table.there)  # it may have been made on another stream
        for kind, rows in table.rows:
            try:
                kernel(rows, found, kind, _PIECE)
            except Exception as error:
                raise _NotBuilt(str(error)) from error
            rows.record_stream(stream)
    for place in table.rest:
        found[0, place] = fingerprint(values[place])
        found[1, place] = 1
    return Seen(list(parts), found[0], found[1])


def _table(values: list[Tensor], device: torch.device) -> _Table:
    by_kind: dict[str, list[tuple[int, int, int]]] = {}
    rest = []
    for place, value in enumerate(values):
        if not in_words(value):
            rest.append(place)
        elif value.numel():
            kind = _LANES.get(value.dtype, "none")
            by_kind.setdefault(kind, []).append((value.data_ptr(), value.nbytes, place))
    rows = [(kind, _pieces(found, device)) for kind, found in by_kind.items()]
    there = torch.cuda.Event()  # type: ignore[no-untyped-call]
    there.record(torch.cuda.current_stream(device))
    return _Table(rows, there, rest)


def in_words(value: Tensor) -> bool:
    """Whether the kernel may read it by its address, and knows its numbers."""
    if type(value) not in PLAIN or value.layout is not torch.strided:  # what wraps other tensors has no address
        return False
    known = value.dtype in _LANES or not (value.is_floating_point() or value.is_complex())
    return known and value.is_contiguous() and value.data_ptr() % 8 == 0


def _pieces(found: list[tuple[int, int, int]], device: torch.device) -> Tensor:
    starts, sizes, places = torch.tensor(found, dtype=torch.int64).unbind(1)
    words = sizes // 8
    counts = ((words + _PIECE - 1) // _PIECE).clamp(min=1)
    whose = torch.repeat_interleave(torch.arange(len(found)), counts)
    nth = torch.arange(len(whose)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    here = (words[whose] - nth * _PIECE).clamp(max=_PIECE)
    tail = torch.where(nth == counts[whose] - 1, sizes[whose] % 8, 0)
    rows = torch.stack([starts[whose] + nth * _PIECE * 8, here, tail, places[whose]], dim=1)
    return rows.contiguous().pin_memory().to(device, non_blocking=True)


class _NotBuilt(Exception):
    """A kernel that could not be compiled or launched."""


def _load(device: torch.device) -> Callable[..., None]:
    from holdfast.runtime.bits_kernel import launch

    nothing = torch.zeros(1, 4, dtype=torch.int64, device=device)
    launch(nothing, nothing.view(2, 2), "none", _PIECE)
    return launch


KERNEL = Kernel(_load, "checksums go tensor by tensor")
