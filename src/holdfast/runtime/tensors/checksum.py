"""Checksums of many tensors where they are, and whether all their values are finite, in one pass.

On CUDA one kernel reads everything once at the speed of memory, however many tensors there are. Without Triton, and on the
CPU, torch operations compute the same. Nothing here waits for a device.
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
from holdfast.runtime.tensors.torch_private import foreach_norm
from holdfast.runtime.tensors.triton_kernels import OptionalKernel

_PIECE = 1 << 16
"""8-byte words that one program of the kernel reads"""
_MAX_TABLES = 4
_PLAIN, _STRIDED = frozenset(PLAIN_TYPES), frozenset({torch.strided})
_FORMATS = {torch.float32: "32", torch.float64: "64", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Checksums(NamedTuple):
    """One number per tensor, in the order of `names`."""

    names: list[str]
    sums: Tensor
    """equal to `bit_checksum` of each tensor, or of a copy of it anywhere"""
    maybe_nonfinite: Tensor
    """0: every value is finite; 1: it may hold NaN or Inf, or was not tested"""


@torch.no_grad()
def checksum_and_finite(tensors: Mapping[str, Tensor], *, finite: bool = True) -> Checksums:
    """Return checksums and finiteness of tensors on one device, enqueued on the current stream. Without `finite` the test
    for finite values may be left out."""
    names, values = list(tensors), _local_parts(tensors.values())
    device = values[0].device if values else torch.device("cpu")
    fused = _fused(names, values, device)
    return fused if fused is not None else _one_by_one(names, values, device, finite)


@torch.no_grad()
def copy_and_checksum(live: Mapping[str, Tensor], kept: Sequence[Tensor]) -> Checksums | None:
    """Copy `kept` into the live tensors and return the checksums of what arrived, in one pass on the current stream.

    All are on one device. Each of `kept` is word-aligned, of its tensor's dtype and shape. Returns None if there is no
    kernel; the contents of the live tensors are then undefined.
    """
    values = _local_parts(live.values())
    return _fused(list(live), values, values[0].device, kept) if values else None


def _local_parts(values: Iterable[Tensor]) -> list[Tensor]:
    parts = list(values)
    return parts if _PLAIN.issuperset(map(type, parts)) else [local_part(value) for value in parts]


def compile_copy_kernel(device: torch.device, dtypes: Collection[torch.dtype]) -> None:
    """Compile what `copy_and_checksum` will need, so that a rollback does not wait for the compiler."""
    if device.type != "cuda" or (kernel := KERNEL.get(device)) is None:
        return
    nothing = torch.zeros(1, 4, dtype=torch.int64, device=device)
    try:
        with torch.cuda.device(device):
            for fmt in {_FORMATS.get(dtype, "none") for dtype in dtypes}:
                kernel(nothing, nothing.view(2, 2), fmt, _PIECE, nothing[0])
    except Exception as error:
        KERNEL.disable(error)


def _one_by_one(names: list[str], values: list[Tensor], device: torch.device, finite: bool) -> Checksums:
    if not names:
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        return Checksums(names, nothing, nothing)
    sums: dict[int, Tensor] = {}
    for dtype in (torch.float32, torch.int64):  # 0-dim tensors together: optimizers have one per parameter
        single = [i for i, value in enumerate(values) if value.dim() == 0 and value.dtype is dtype]
        if single:
            stacked = torch.stack([values[i] for i in single])
            if dtype is torch.float32:  # summed as bytes, like everything that does not fill a word
                stacked = stacked.view(torch.uint8).view(len(single), -1).sum(1, dtype=torch.int64)
            sums.update(zip(single, stacked.unbind(), strict=True))
    together = torch.stack([sums[i] if i in sums else _sum(value) for i, value in enumerate(values)])
    maybe_nonfinite = torch.ones(len(names), dtype=torch.int64, device=device)
    # A norm may overflow although every value is finite: the flag is then 1, which only means "maybe".
    normed = [i for i, value in enumerate(values) if value.dtype in _FORMATS and value.layout is torch.strided]
    if finite and normed and device.type != "cpu":
        norms = torch.stack([n.double() for n in foreach_norm([values[i] for i in normed])])
        indices = torch.tensor(normed).to(device, non_blocking=True)
        maybe_nonfinite.index_copy_(0, indices, (~norms.isfinite()).to(torch.int64))
    return Checksums(names, together, maybe_nonfinite)


def _sum(value: Tensor) -> Tensor:
    """Return `bit_checksum`, in fewer launches if the tensor is aligned: launching costs more than summing."""
    size = value.element_size()
    is_dense = value.layout is torch.strided and value.is_contiguous() and value.numel() > 0
    if (
        is_dense
        and value.numel() * size % 8 == value.storage_offset() * size % 8 == 0
        and value.dtype.is_floating_point
    ):
        return value.view(-1).view(torch.int64).sum()
    return bit_checksum(value)


# ---- in one kernel


class _Table(NamedTuple):
    """The addresses of tensors, cut into pieces, on the device."""

    rows: list[tuple[str, Tensor]]
    """number format, and rows of (address, words, bytes after them, index of the tensor)"""
    uploaded: torch.cuda.Event
    others: list[int]
    """tensors that are not word-aligned or that the kernel does not support: summed one by one"""
    addresses: Tensor
    """the address of each tensor, on the host; 0 for those of `others` and empty ones"""


_tables: dict[tuple[Any, ...], _Table] = {}


def _fused(
    names: list[str], values: list[Tensor], device: torch.device, kept: Sequence[Tensor] | None = None
) -> Checksums | None:
    """Return None if the kernel is not available."""
    if device.type != "cuda" or (kernel := KERNEL.get(device)) is None:
        return None
    table = _table_for(values, device)
    results = torch.zeros(2, len(values), dtype=torch.int64, device=device)
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream()
        stream.wait_event(table.uploaded)  # another stream may have uploaded it
        offsets = _source_offsets(table, kept, device) if kept is not None else None
        for fmt, rows in table.rows:
            try:
                kernel(rows, results, fmt, _PIECE, offsets)
            except Exception as error:
                KERNEL.disable(error)
                return None
            rows.record_stream(stream)
    for index in table.others:
        if kept is not None:
            values[index].copy_(kept[index])
        results[0, index].copy_(bit_checksum(values[index]))
        results[1, index].fill_(1)  # assigning a Python number would synchronize
    if kept is not None:  # autograd must notice the write, as after any other write in place
        torch.autograd.graph.increment_version([v for v in values if not v.is_inference()])
    return Checksums(names, results[0], results[1])


def _table_for(values: list[Tensor], device: torch.device) -> _Table:
    """Return the table of these tensors, cached while their addresses, sizes and dtypes stay the same."""
    plain = values
    if not (_PLAIN.issuperset(map(type, values)) and _STRIDED.issuperset(map(attrgetter("layout"), values))):
        plain = [v for v in values if _has_address(v)]
    addresses, sizes = (array("q", map(number, plain)).tobytes() for number in (Tensor.data_ptr, Tensor.numel))
    contiguous = bytes(map(Tensor.is_contiguous, plain))
    key = (device.index, len(values), addresses, sizes, contiguous, *map(attrgetter("dtype"), plain))
    table = _tables.pop(key, None)
    if table is None:
        table = _make_table(values, device)
        for old in list(_tables)[: 1 - _MAX_TABLES]:
            _tables.pop(old, None)
    if len(plain) == len(values):  # the key does not describe tensors without an address
        _tables[key] = table
    return table


def _source_offsets(table: _Table, kept: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the bytes from each tensor to the one that is copied into it."""
    sources = torch.frombuffer(array("q", map(Tensor.data_ptr, kept)), dtype=torch.int64)
    return (sources - table.addresses).pin_memory().to(device, non_blocking=True)


def _make_table(values: list[Tensor], device: torch.device) -> _Table:
    by_format: dict[str, list[tuple[int, int, int]]] = {}
    others = []
    addresses = [0] * len(values)
    for index, value in enumerate(values):
        if not is_word_aligned(value):
            others.append(index)
        elif value.numel():
            by_format.setdefault(_FORMATS.get(value.dtype, "none"), []).append((value.data_ptr(), value.nbytes, index))
            addresses[index] = value.data_ptr()
    rows = [(fmt, _pieces(tensors, device)) for fmt, tensors in by_format.items()]
    uploaded = torch.cuda.Event()  # type: ignore[no-untyped-call]
    uploaded.record(torch.cuda.current_stream(device))
    return _Table(rows, uploaded, others, torch.tensor(addresses, dtype=torch.int64))


def is_word_aligned(value: Tensor) -> bool:
    """Return whether the kernel may read the tensor by its address, and supports its dtype."""
    if not _has_address(value):
        return False
    is_supported = value.dtype in _FORMATS or not (value.is_floating_point() or value.is_complex())
    return is_supported and value.is_contiguous() and value.data_ptr() % 8 == 0


def _has_address(value: Tensor) -> bool:
    """Return whether the tensor is its own memory: a subclass that wraps other tensors has no address."""
    return type(value) in PLAIN_TYPES and value.layout is torch.strided


def _pieces(tensors: list[tuple[int, int, int]], device: torch.device) -> Tensor:
    """Cut tensors, given as (address, bytes, index), into rows of a table."""
    starts, sizes, indices = torch.tensor(tensors, dtype=torch.int64).unbind(1)
    words = sizes // 8
    counts = ((words + _PIECE - 1) // _PIECE).clamp(min=1)
    owner = torch.repeat_interleave(torch.arange(len(tensors)), counts)
    nth = torch.arange(len(owner)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    length = (words[owner] - nth * _PIECE).clamp(max=_PIECE)
    tail = torch.where(nth == counts[owner] - 1, sizes[owner] % 8, 0)
    rows = torch.stack([starts[owner] + nth * _PIECE * 8, length, tail, indices[owner]], dim=1)
    return rows.contiguous().pin_memory().to(device, non_blocking=True)


def _load(device: torch.device) -> Callable[..., None]:
    from holdfast.runtime.tensors.checksum_kernel import launch

    nothing = torch.zeros(1, 4, dtype=torch.int64, device=device)
    launch(nothing, nothing.view(2, 2), "none", _PIECE)
    return launch


KERNEL = OptionalKernel(_load, "checksums are computed tensor by tensor")


@torch.no_grad()
def fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a fingerprint of each tensor on its device. A GPU reads all in one pass: they may be most of the model."""
    found: dict[str, Tensor] = {}
    for device in {value.device for value in tensors.values()}:
        on_device = {name: value for name, value in tensors.items() if value.device == device}
        if device.type == "cpu":
            found.update({name: bit_checksum(value) for name, value in on_device.items()})
        else:
            checked = checksum_and_finite(on_device, finite=False)
            found.update(zip(checked.names, checked.sums.unbind(), strict=True))
    return found
