"""One look at many tensors where they lie: a sum over the bits of each, and whether all its values are finite.

On CUDA one kernel reads everything once, at the speed of memory, however many tensors there are. Where Triton is not there,
and on the CPU, torch's own operations say the same. Nothing here waits for a device.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.runtime.tensors.inspect import bit_checksum
from holdfast.runtime.tensors.named_params import PLAIN_TYPES, local_part
from holdfast.runtime.tensors.triton_kernels import OptionalKernel

_PIECE = 1 << 16
"""words of eight bytes that one program of the kernel reads"""
_KEPT = 4
_PLAIN, _STRIDED = frozenset(PLAIN_TYPES), frozenset({torch.strided})
_LANES = {
    torch.float32: "32",
    torch.float64: "64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


class Checksums(NamedTuple):
    """One number a tensor, in the order of `names`, on the tensors' device."""

    names: list[str]
    sums: Tensor
    """the same as `bit_checksum` says of each, or of a copy of it anywhere"""
    bad: Tensor
    """0: every value is finite; 1: it may hold NaN or Inf, or nobody has looked"""


@torch.no_grad()
def checksum_and_finite(tensors: Mapping[str, Tensor], *, finite: bool = True) -> Checksums:
    """Enqueued on the current stream. All tensors are on one device. `finite`: whether anybody wants to know."""
    names, values = list(tensors), _parts(tensors.values())
    device = values[0].device if values else torch.device("cpu")
    found = _at_one_stroke(names, values, device)
    return found if found is not None else _one_by_one(names, values, device, finite)


@torch.no_grad()
def copy_and_checksum(live: Mapping[str, Tensor], kept: Sequence[Tensor]) -> Checksums | None:
    """Copy what is kept of them into live tensors, and look at what has arrived there, at one stroke: enqueued on the
    current stream. All are on one device; what is kept of each lies in words, of the same type and shape. None: there is
    no such stroke here, and what is in the live tensors now has no meaning."""
    values = _parts(live.values())
    return _at_one_stroke(list(live), values, values[0].device, kept) if values else None


def _parts(values: Iterable[Tensor]) -> list[Tensor]:
    """What this rank has of each."""
    found = list(values)
    return found if _PLAIN.issuperset(map(type, found)) else [local_part(value) for value in found]


def compile_copy_kernel(device: torch.device, dtypes: Collection[torch.dtype]) -> None:
    """Build now what `copy_and_checksum` will need, so that a return does not wait for a compiler."""
    if device.type != "cuda" or (kernel := KERNEL.get(device)) is None:
        return
    nothing = torch.zeros(1, 4, dtype=torch.int64, device=device)
    try:
        with torch.cuda.device(device):
            for kind in {_LANES.get(dtype, "none") for dtype in dtypes}:
                kernel(nothing, nothing.view(2, 2), kind, _PIECE, nothing[0])
    except Exception as error:
        KERNEL.disable(error)


def _one_by_one(names: list[str], values: list[Tensor], device: torch.device, finite: bool) -> Checksums:
    if not names:
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        return Checksums(names, nothing, nothing)
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
    return Checksums(names, together, bad)


def _sum(value: Tensor) -> Tensor:
    """`bit_checksum`, by the shortest way where the memory allows it: launching costs more than summing."""
    size = value.element_size()
    words = value.layout is torch.strided and value.is_contiguous() and value.numel() > 0
    if words and value.numel() * size % 8 == value.storage_offset() * size % 8 == 0 and value.dtype.is_floating_point:
        return value.view(-1).view(torch.int64).sum()
    return bit_checksum(value)


# ---- at one stroke


class _Table(NamedTuple):
    """Where the tensors lie, cut into pieces: by kind of number, rows of address, words, bytes after them, place."""

    rows: list[tuple[str, Tensor]]
    there: torch.cuda.Event
    """when the rows are on the device"""
    rest: list[int]
    """the tensors that do not lie in words, or whose numbers the kernel does not know: looked at one by one"""
    starts: Tensor
    """the address of each, on the host; 0 for what has none or is empty"""


_tables: dict[tuple[Any, ...], _Table] = {}


def _at_one_stroke(
    names: list[str], values: list[Tensor], device: torch.device, kept: Sequence[Tensor] | None = None
) -> Checksums | None:
    """None: there is no kernel, or no such variant of it."""
    if device.type != "cuda" or (kernel := KERNEL.get(device)) is None:
        return None
    table = _known(values, device)
    found = torch.zeros(2, len(values), dtype=torch.int64, device=device)
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream()
        stream.wait_event(table.there)  # it may have been made on another stream
        ways = _ways(table, kept, device) if kept is not None else None
        for kind, rows in table.rows:
            try:
                kernel(rows, found, kind, _PIECE, ways)
            except Exception as error:
                KERNEL.disable(error)
                return None
            rows.record_stream(stream)
    for place in table.rest:
        if kept is not None:
            values[place].copy_(kept[place])
        found[0, place].copy_(bit_checksum(values[place]))
        found[1, place].fill_(1)  # to assign a number would be to wait
    if kept is not None:  # who kept a graph across it is to be told by autograd, as after any other write in place
        torch.autograd.graph.increment_version([v for v in values if not v.is_inference()])
    return Checksums(names, found[0], found[1])


def _known(values: list[Tensor], device: torch.device) -> _Table:
    """The table of these: made once, for as long as they lie where they lie and as they do."""
    plain = values
    if not (_PLAIN.issuperset(map(type, values)) and _STRIDED.issuperset(map(attrgetter("layout"), values))):
        plain = [v for v in values if _lies_flat(v)]
    places, sizes = (array("q", map(number, plain)).tobytes() for number in (Tensor.data_ptr, Tensor.numel))
    how = bytes(map(Tensor.is_contiguous, plain))
    key = (device.index, len(values), places, sizes, how, *map(attrgetter("dtype"), plain))
    table = _tables.pop(key, None)
    if table is None:
        table = _table(values, device)
        for old in list(_tables)[: 1 - _KEPT]:
            _tables.pop(old, None)
    if len(plain) == len(values):  # of what has no address the key says nothing
        _tables[key] = table
    return table


def _ways(table: _Table, kept: Sequence[Tensor], device: torch.device) -> Tensor:
    """How many bytes from each value what is kept of it lies."""
    there = torch.frombuffer(array("q", map(Tensor.data_ptr, kept)), dtype=torch.int64)
    return (there - table.starts).pin_memory().to(device, non_blocking=True)


def _table(values: list[Tensor], device: torch.device) -> _Table:
    by_kind: dict[str, list[tuple[int, int, int]]] = {}
    rest = []
    starts = torch.zeros(len(values), dtype=torch.int64)
    for place, value in enumerate(values):
        if not is_word_aligned(value):
            rest.append(place)
        elif value.numel():
            kind = _LANES.get(value.dtype, "none")
            by_kind.setdefault(kind, []).append((value.data_ptr(), value.nbytes, place))
    for found in by_kind.values():
        addresses, _, places = torch.tensor(found, dtype=torch.int64).unbind(1)
        starts[places] = addresses
    rows = [(kind, _pieces(found, device)) for kind, found in by_kind.items()]
    there = torch.cuda.Event()  # type: ignore[no-untyped-call]
    there.record(torch.cuda.current_stream(device))
    return _Table(rows, there, rest, starts)


def is_word_aligned(value: Tensor) -> bool:
    """Whether the kernel may read it by its address, and knows its numbers."""
    if not _lies_flat(value):
        return False
    known = value.dtype in _LANES or not (value.is_floating_point() or value.is_complex())
    return known and value.is_contiguous() and value.data_ptr() % 8 == 0


def _lies_flat(value: Tensor) -> bool:
    """What wraps other tensors has no address."""
    return type(value) in PLAIN_TYPES and value.layout is torch.strided


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


def _load(device: torch.device) -> Callable[..., None]:
    from holdfast.runtime.tensors.checksum_kernel import launch

    nothing = torch.zeros(1, 4, dtype=torch.int64, device=device)
    launch(nothing, nothing.view(2, 2), "none", _PIECE)
    return launch


KERNEL = OptionalKernel(_load, "checksums go tensor by tensor")
