"""What the text of an out-of-memory error says: how much was asked, free, allocated, and reserved but unallocated.

Before torch raises the error it has returned every unused segment to the driver. So memory that is still reserved but
unallocated is in parts of segments that are in use: fragmentation.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from holdfast.core.base.types import Kind

LEAK, FRAGMENTATION, CAPACITY = Kind.MEMORY_LEAK, Kind.FRAGMENTATION, Kind.MEMORY_CAPACITY
HOST_GROWTH, NOT_ESTABLISHED = Kind.HOST_GROWTH, Kind.OUT_OF_MEMORY

CURES: dict[str, str] = {
    LEAK: "something keeps tensors of every step: a loss kept with its graph (append loss.item() or loss.detach()), "
    "outputs or hidden states in a list or a hook, backward(retain_graph=True), a cache without a bound",
    FRAGMENTATION: "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; pad sequences to a few lengths; allocate tensors "
    "that live long before the first step",
    CAPACITY: "use smaller micro-batches with more accumulation, a lower maximum sequence length, activation checkpointing, "
    "or sharded optimizer state",
    HOST_GROWTH: "in the main process look for lists that grow with every step; in loader workers for a data set of Python "
    "lists or dicts, which every worker copies page by page: keep it in one NumPy array or tensor, or in a memory-mapped "
    "file",
    NOT_ESTABLISHED: "look at a memory limit of the process, the container or the driver, and at other processes",
}
SHARED_MEMORY_CURE = (
    "raise the size of /dev/shm (docker run --shm-size), or use fewer workers or a lower prefetch_factor"
)
_MIN_UNALLOCATED = 0.05
"""reserved but unallocated memory below this share of the device is what every run has"""
_FULL = 0.9
"""with more than this share allocated the device is full, unless the request is large and would fit by far"""
_LARGE_REQUEST = 0.01
_IN_USE_BY_DRIVER = 2 << 30
"""a device context and libraries take up to this much outside of torch"""

_UNITS = {"b": 1, "bytes": 1, "kib": 1 << 10, "kb": 1 << 10, "mib": 1 << 20, "mb": 1 << 20, "gib": 1 << 30, "gb": 1 << 30,
          "tib": 1 << 40, "tb": 1 << 40}  # fmt: skip
_SIZE = r"(\d+(?:\.\d+)?) ?(bytes|[kmgt]i?b|b)\b"
_PATTERNS = {
    "asked": rf"tr(?:ied|ying) to allocate (?:about )?{_SIZE}",
    "total": rf"total capaci?ty of {_SIZE}|{_SIZE} total capacity",
    "free": rf"of which {_SIZE} is free|{_SIZE} free\b",
    "allowed": rf"{_SIZE} allowed|max allowed: {_SIZE}",
    "allocated": rf"{_SIZE} is allocated by pytorch|{_SIZE} already allocated|mps allocated: {_SIZE}",
    "unallocated": rf"{_SIZE} is reserved by pytorch but unallocated",
    "other": rf"other allocations: {_SIZE}",
    "reserved": rf"{_SIZE} reserved in total|{_SIZE} cached",
}
_FIELDS = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in _PATTERNS.items()}
_HOST = re.compile(
    r"defaultcpuallocator|can'?t allocate memory|cannot allocate memory|out of memory:? kill|\bmemoryerror\b"
    r"|\boom[-_ ]?kill(?!_disable|:? 0\b)|task \d[\d,-]*: out of memory|running low on memory|paging file is too small"
    r"|oom when allocating .*(?:device:cpu|allocator \w*cpu\b)"
    r"|exceeded (?:job |step )?memory limit|memory usage limit|\bmem \w+ exceeded limit"
    r"|memory allocation of \d+ bytes failed|malloc of size \d+ failed|memory cgroup out of memory|std::bad_alloc"
    r"|unable to allocate .* for an array",
    re.IGNORECASE,
)
_PINNED = re.compile(r"cuda_?hostalloc|pinned (?:host )?memory", re.IGNORECASE)
_SHARED_MEMORY = re.compile(
    r"out of shared memory|insufficient shared memory|unable to (?:mmap|write|allocate|resize|open) .*shared memory"
    r"|shared memory limit|creating shared memory segment|unable to write to file </torch_"
    r"|no space left on device.*/dev/shm|/dev/shm.*no space left on device",
    re.IGNORECASE,
)
_DEVICE = re.compile(
    r"(?:cuda|hip|xpu|mps|npu|gpu)\b.{0,60}out of memory|outofmemoryerror|cuda_error_out_of_memory|cudaerrormemoryallocation"
    r"|(?:cublas|cudnn|cusolver|cusparse)_status_alloc_failed|out of memory|oom when allocating|failed to cuda calloc"
    r"|invalid buffer size"
    r"|resource_?exhausted.{0,200}(?:allocat|memory|hbm)",
    re.IGNORECASE,
)
_ADVICE = re.compile(
    r"\b(?:if|in case|avoid\w*|prevent\w*|when running|(?:may|might|could|can) (?:lead|cause|result|run))\b[^.,:;]{0,40}"
    r"\bout[- ]of[- ]memory",
    re.IGNORECASE,
)
_ANOTHER_ERROR = re.compile(r"this is not a failure|too many open files", re.IGNORECASE)


class OutOfMemory(NamedTuple):
    """A failed allocation, in bytes. What the text does not say is None."""

    where: str
    """device, host or shared memory"""
    asked: float | None = None
    free: float | None = None
    total: float | None = None
    allowed: float | None = None
    """the limit of the process, if it has set one"""
    allocated: float | None = None
    unallocated: float | None = None
    """reserved, but not allocated"""

    @property
    def limit(self) -> float | None:
        return self.total if self.allowed is None else self.allowed

    @property
    def free_for_process(self) -> float:
        """Return what the process could still reserve."""
        free = self.free or 0.0
        if self.allowed is None or self.allocated is None:
            return free
        return max(0.0, min(free, self.allowed - self.allocated - (self.unallocated or 0.0)))


class Explanation(NamedTuple):
    """The verdict on a failed allocation, and the numbers behind it in words."""

    kind: str
    text: str
    cure: str


def parse(text: str) -> OutOfMemory | None:
    """Return what a line of a log says about a failed allocation; None if it reports none."""
    text = _ADVICE.sub("", text[:4000])
    if _ANOTHER_ERROR.search(text):
        return None
    if _SHARED_MEMORY.search(text):
        return OutOfMemory("shared memory")
    is_host = _HOST.search(text) is not None
    if not is_host:
        if not _DEVICE.search(text):
            return None
        is_host = _PINNED.search(text) is not None
    sizes = {name: _read_size(pattern, text) for name, pattern in _FIELDS.items()}
    allocated, reserved, unallocated = sizes["allocated"], sizes.pop("reserved"), sizes.pop("unallocated")
    if (other := sizes.pop("other")) is not None and allocated is not None:
        sizes["allocated"] = allocated + other
    if unallocated is None and reserved is not None and allocated is not None:
        # The first versions of torch named the difference "cached".
        unallocated = reserved - allocated if reserved >= allocated else reserved
    return OutOfMemory("host" if is_host else "device", unallocated=unallocated, **sizes)


def _read_size(pattern: re.Pattern[str], text: str) -> float | None:
    if (match := pattern.search(text)) is None:
        return None
    number, unit = (group for group in match.groups() if group is not None)
    return float(number) * _UNITS[unit.lower()]


def explain(failed: OutOfMemory) -> Explanation:
    """Return the verdict on a failed allocation: fragmentation if the request would fit into the unused parts of segments.

    A text alone cannot tell a device that the batch fills from one that a leak has filled. `MemoryDetector.explain` can.
    """
    sizes = describe_sizes(failed)
    if failed.where != "device":
        cure = SHARED_MEMORY_CURE if failed.where == "shared memory" else CURES[HOST_GROWTH]
        return Explanation(CAPACITY, f"the {failed.where} ran out of memory{sizes and f': {sizes}'}", cure)
    if (
        failed.asked is not None
        and failed.limit is not None
        and failed.asked + (failed.allocated or 0.0) > failed.limit
    ):
        failed = failed._replace(allocated=failed.allocated or 0.0, unallocated=failed.unallocated or 0.0)
    if failed.asked is None or failed.unallocated is None or failed.limit is None or failed.allocated is None:
        return Explanation(NOT_ESTABLISHED, f"the device ran out of memory; {sizes or 'the text has no sizes'}", "")
    asked, unallocated, limit, free = failed.asked, failed.unallocated, failed.limit, failed.free_for_process
    if free > asked + 0.02 * limit:
        text = f"{sizes}: enough was free, and the driver refused"
        return Explanation(NOT_ESTABLISHED, text, CURES[NOT_ESTABLISHED])
    is_large = asked >= _LARGE_REQUEST * limit and unallocated >= 2 * asked
    is_wasted = unallocated >= _MIN_UNALLOCATED * limit and (failed.allocated <= _FULL * limit or is_large)
    if free + unallocated >= asked and is_wasted:
        text = f"{sizes}: the request fits into memory that is reserved but unallocated, in pieces"
        return Explanation(FRAGMENTATION, text, CURES[FRAGMENTATION])
    if others := _used_by_others(failed):
        text = f"{sizes}; other processes use about {format_bytes(others)} of the device"
        return Explanation(
            CAPACITY, text, "end the other processes on the device, or choose another; nvidia-smi lists them"
        )
    return Explanation(CAPACITY, f"{sizes}: the memory is in use", CURES[CAPACITY])


def _used_by_others(failed: OutOfMemory) -> float:
    """Return the bytes that other processes use, if they are what is missing; otherwise 0."""
    if failed.allowed is not None or failed.total is None or failed.free is None:
        return 0.0
    others = failed.total - failed.free - (failed.allocated or 0.0) - (failed.unallocated or 0.0)
    is_missing = others - _IN_USE_BY_DRIVER > max(0.1 * failed.total, (failed.asked or 0.0) - failed.free)
    return others if is_missing else 0.0


def describe_sizes(failed: OutOfMemory) -> str:
    """Return the sizes that are known, in words."""
    parts = [
        (failed.asked, "asked"),
        (failed.free_for_process if failed.free is not None else None, "free"),
        (failed.unallocated, "reserved but unallocated"),
        (failed.allocated, "allocated"),
        (failed.limit, "in all" if failed.allowed is None else "allowed"),
    ]
    return ", ".join(f"{format_bytes(size)} {name}" for size, name in parts if size is not None)


def format_bytes(size: float) -> str:
    """Return a size in MB or GB."""
    return f"{size / 1e9:.2f} GB" if abs(size) >= 1e9 else f"{size / 1e6:.1f} MB"
