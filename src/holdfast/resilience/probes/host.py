"""Probes of the host: whether its cores compute and its memory stores, and whether its limits leave room to train."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.core.base import durable
from holdfast.core.base.probe_result import ProbeResult, ProbeStatus
from holdfast.resilience.probes.probe import Probe, ProbeSettings, failed, make, not_checked, ok

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""for the child of these probes: a pinned core must do the work itself"""
CPU = "cpu"
_GB = 1e9
_MIN_SHARED_BYTES, _NO_SHARED_BYTES = 1 << 30, 1 << 20
_MIN_FILES, _MIN_PROCESSES = 4096, 4096
_MIN_LOCKED_BYTES = 64 << 20
_PATTERNS = (0, 0xFFFF_FFFF_FFFF_FFFF, 0xAAAA_AAAA_AAAA_AAAA, 0x5555_5555_5555_5555)


def known_product(size: int) -> tuple[Any, Any, Any]:
    """Return two matrices of whole numbers and their product, as int64. `size` is even and at least 16.

    The product is known from the construction: a[i] * b[j] * 8. The terms of each sum are eight ones and then +1 and -1 in
    turn, so the sum of any stretch of them is small and exact in every dtype, bf16 included.
    """
    import numpy as np

    signs = np.ones(size, dtype=np.int64)
    signs[9::2] = -1
    rows, columns = np.arange(size)[:, None] % 5 + 1, np.arange(size)[None, :] % 6 + 1
    return rows * signs[None, :], np.broadcast_to(columns, (size, size)).copy(), rows * columns * 8


def check_cores(settings: ProbeSettings) -> ProbeResult:
    """Multiply matrices of a known product on each core, in whole numbers and floats, and one of random floats twice."""
    import numpy as np

    size = 96 if settings.effort == "full" else 48
    cases = [[m.astype(kind) for m in known_product(size)] for kind in (np.int64, np.float32, np.float64)]
    random = np.random.default_rng(0).standard_normal((4 * size, 4 * size))
    first = random @ random
    cores = sorted(os.sched_getaffinity(0))
    wrong, seconds = [], float("inf")
    try:
        for core in cores:
            os.sched_setaffinity(0, {core})
            began = time.perf_counter()
            again = random @ random
            seconds = min(seconds, time.perf_counter() - began)
            exact = all(np.array_equal(left @ right, product) for left, right, product in cases)
            if not exact or not np.array_equal(again, first):
                wrong.append(core)
    finally:
        os.sched_setaffinity(0, cores)
    flops = 2 * len(random) ** 3 / seconds
    if wrong:
        return failed("cpu", f"wrong products on cores {wrong[:16]} of {len(cores)}", _REPLACE, device=CPU)
    return ok("cpu", f"{len(cores)} cores give the known products", {"one_core": (flops / 1e9, "GFLOP/s")})


_REPLACE = "leave this host out and have it tested: it computes or stores wrongly"


def check_memory(settings: ProbeSettings) -> ProbeResult:
    """Write patterns to a bounded part of the memory, read them back, and measure the speed of a copy."""
    import numpy as np

    available = _meminfo().get("MemAvailable", 0)
    wanted = (128 if settings.effort == "full" else 32) << 20
    size = min(wanted, available // 20)
    if size < 1 << 20:
        return not_checked("memory", f"only {available / _GB:.2f} GB are available", "end other processes")
    block = np.empty(size // 8, dtype=np.uint64)
    for pattern in _PATTERNS:
        block.fill(pattern)
        if not (block == np.uint64(pattern)).all():
            return failed("memory", f"{size >> 20} MB came back with other values", _REPLACE, device=CPU)
    addresses = np.arange(len(block), dtype=np.uint64)
    seconds = float("inf")
    for _ in range(4):
        began = time.perf_counter()
        np.copyto(block, addresses)
        seconds = min(seconds, time.perf_counter() - began)
    if not np.array_equal(block, np.arange(len(block), dtype=np.uint64)):
        return failed("memory", f"a copy of {size >> 20} MB has other values", _REPLACE, device=CPU)
    speed = 2 * block.nbytes / seconds / _GB
    text = f"{size >> 20} MB keep their patterns; one core copies {speed:.1f} GB/s, reads and writes counted"
    return ok("memory", text, {"tested": (size / 1e6, "MB"), "copy": (speed, "GB/s")})


def check_use(settings: ProbeSettings) -> ProbeResult:
    """Report how much memory, swap and processor time others use."""
    info, cores = _meminfo(), os.cpu_count() or 1
    total, available = info["MemTotal"], info["MemAvailable"]
    swapped, load = info["SwapTotal"] - info["SwapFree"], os.getloadavg()[0]
    numbers = {
        "memory": (total / _GB, "GB"), "available": (available / _GB, "GB"), "swap_used": (swapped / _GB, "GB"),
        "load": (load, ""),
    }  # fmt: skip
    text = f"{available / _GB:.1f} of {total / _GB:.1f} GB available, {swapped / _GB:.2f} GB swapped, load {load:.1f}"
    if available < total / 10 or swapped > total / 10:
        return make("use", ProbeStatus.WARNING, text, "end other processes: training would swap or be killed", numbers)
    if load > 2 * cores:
        cure = f"find what else runs here: {cores} cores are shared"
        return make("use", ProbeStatus.WARNING, text, cure, numbers)
    return make("use", ProbeStatus.NOTE if swapped else ProbeStatus.OK, text, numbers=numbers)


def _meminfo() -> dict[str, int]:
    """Return the fields of /proc/meminfo in bytes."""
    lines = durable.read_file(Path("/proc/meminfo"), 1 << 16).decode().splitlines()
    fields = (line.split() for line in lines)
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in fields if len(words) >= 2}


def check_shared_memory(settings: ProbeSettings) -> ProbeResult:
    """Report the size of shared memory: loader workers hand batches over in it."""
    place, name = settings.shared_memory, "shared memory"
    try:
        status = os.statvfs(place)
        writable = os.access(place, os.W_OK)
    except OSError as error:
        return failed(name, f"{place}: {error.strerror}", "mount a tmpfs there: loader workers need it")
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    if not writable:
        return failed(name, f"{place} cannot be written", "mount it with mode 1777: loader workers need it")
    text = f"{place}: {free / 1e6:,.1f} of {size / 1e6:,.1f} MB free"
    numbers = {"free": (free / _GB, "GB"), "size": (size / _GB, "GB")}
    if free < _MIN_SHARED_BYTES:
        cure = "give it more (docker run --shm-size=8g), or remove what is left there: loader workers die of SIGBUS"
        severity = ProbeStatus.FAILED if free < _NO_SHARED_BYTES else ProbeStatus.WARNING
        return make(name, severity, text, cure, numbers)
    return ok(name, text, numbers)


def check_limits(settings: ProbeSettings) -> ProbeResult:
    """Compare the limits of this process with what a training run needs."""
    problems = list(_limit_problems())
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    numbers = {"open_files": (float(files), "files")} if files != resource.RLIM_INFINITY else {}
    if not problems:
        return ok("limits", "open files, processes, locked memory, file size and address space leave room", numbers)
    is_note = all(severity == ProbeStatus.NOTE for severity, _, _ in problems)
    text, cure = "; ".join(text for _, text, _ in problems), "; ".join(cure for _, _, cure in problems)
    return make("limits", ProbeStatus.NOTE if is_note else ProbeStatus.WARNING, text, cure, numbers)


def _finite(limit: int) -> float:
    return float("inf") if limit == resource.RLIM_INFINITY else limit


def _limit_problems() -> Iterator[tuple[ProbeStatus, str, str]]:
    """Yield severity, text and cure of every limit that is too low."""

    def soft(which: int) -> float:
        return _finite(resource.getrlimit(which)[0])

    warning, note = ProbeStatus.WARNING, ProbeStatus.NOTE
    if (files := soft(resource.RLIMIT_NOFILE)) < _MIN_FILES:
        yield warning, f"{files:g} open files: loader workers and peer ranks take many", "ulimit -n 65536"
    if (processes := soft(resource.RLIMIT_NPROC)) < _MIN_PROCESSES:
        yield warning, f"{processes:g} processes: threads of all ranks and workers count", "ulimit -u 65536"
    if (size := soft(resource.RLIMIT_FSIZE)) != float("inf"):
        yield warning, f"files may have {size / _GB:.3g} GB: a larger checkpoint fails", "ulimit -f unlimited"
    if (space := soft(resource.RLIMIT_AS)) != float("inf"):
        yield warning, f"{space / _GB:.3g} GB of address space: CUDA reserves more", "ulimit -v unlimited"
    if (seconds := soft(resource.RLIMIT_CPU)) != float("inf"):
        yield warning, f"{seconds:g} s of processor time: then SIGXCPU ends the process", "ulimit -t unlimited"
    if (locked := soft(resource.RLIMIT_MEMLOCK)) < _MIN_LOCKED_BYTES:
        has_fabric = os.path.isdir("/sys/class/infiniband") and bool(os.listdir("/sys/class/infiniband"))
        cure = "ulimit -l unlimited, and for Slurm PropagateResourceLimitsExcept=MEMLOCK"
        yield warning if has_fabric else note, f"{locked / 1e6:.3g} MB of locked memory: InfiniBand needs more", cure
    if soft(resource.RLIMIT_CORE) == float("inf"):
        yield note, "core dumps are unlimited: each crashed rank may write its whole memory", "ulimit -c 0"


PROBES = (
    Probe("cpu", 120.0, check_cores),
    Probe("memory", 60.0, check_memory),
    Probe("use", 5.0, check_use),
    Probe("shared memory", 5.0, check_shared_memory),
    Probe("limits", 5.0, check_limits),
)
