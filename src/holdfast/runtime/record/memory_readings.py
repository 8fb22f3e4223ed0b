"""Read the memory of this process: on a CUDA device without waiting for it, and on the host from /proc."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from holdfast.core.detectors.memory import MemoryReading
from holdfast.runtime.tensors.torch_private import cuda_is_initialized

_PAGE = os.sysconf("SC_PAGE_SIZE")
_PROC = Path("/proc")


def read_memory(step: int, device: torch.device | None, limit: int | None, host: dict[str, int]) -> MemoryReading:
    """Return a reading: of the device, if it is a CUDA device in use, of this process, and `host` as it was read before."""
    values: dict[str, Any] = {} if device is None else read_device(device)
    return MemoryReading(step, **values, limit=limit if values else None, host=read_resident(), **host)


def read_device(device: torch.device) -> dict[str, int]:
    """Return the counters of torch's allocator, by one call; nothing if the device is no CUDA device or not in use."""
    if device.type != "cuda" or not (stats := torch.cuda.memory_stats_as_nested_dict(device)):
        return {}
    return {
        "allocated": stats["allocated_bytes"]["all"]["current"],
        "reserved": stats["reserved_bytes"]["all"]["current"],
        "peak": stats["allocated_bytes"]["all"]["peak"],
        "inactive_split": stats["inactive_split_bytes"]["all"]["current"],
        "retries": stats["num_alloc_retries"],
        "ooms": stats["num_ooms"],
    }


def device_limit(device: torch.device) -> int | None:
    """Return the bytes that this process may reserve on a CUDA device: its share, and what other processes leave."""
    if device.type != "cuda" or not cuda_is_initialized():
        return None
    free, total = torch.cuda.mem_get_info(device)
    share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)(device)
    return min(int(share * total), free + torch.cuda.memory_reserved(device))


def read_resident() -> int | None:
    """Return the anonymous memory of this process: pages of files do not count, the kernel takes them back."""
    try:
        fields = (_PROC / "self/statm").read_bytes().split()
        return (int(fields[1]) - int(fields[2])) * _PAGE
    except (OSError, ValueError, IndexError):
        return None


def read_host(available: int) -> dict[str, int]:
    """Return the memory of child processes, shared memory and the page cache. It takes milliseconds or more.

    Resident memory does not show pages that a worker has copied after a fork. The proportional share does: the sum over all
    processes, less the memory of this one, is what the children have for themselves.
    """
    values = {"host_left": available}
    try:
        shares = [_read_table(_PROC / str(pid) / "smaps_rollup") for pid in (os.getpid(), *_children())]
        own = shares[0]["Anonymous"]
        values["workers"] = max(0, sum(share.get("Pss_Anon", 0) for share in shares) - own)
    except (OSError, KeyError):
        pass
    try:
        disk = os.statvfs("/dev/shm")
        values["shm"] = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
        values["shm_left"] = disk.f_bavail * disk.f_frsize
    except OSError:
        pass
    cached = _read_table(_PROC / "meminfo").get("Cached")
    return values if cached is None else values | {"page_cache": cached}


def _children() -> list[int]:
    """Return the processes that descend from this one."""
    parents: dict[int, int] = {}
    for name in os.listdir(_PROC):
        if name.isdigit():
            try:
                # The command may hold spaces and brackets; the fields after it do not.
                parents[int(name)] = int((_PROC / name / "stat").read_bytes().rpartition(b")")[2].split()[1])
            except (OSError, ValueError, IndexError):  # it has just ended
                continue
    found, waiting = [], [os.getpid()]
    while waiting:
        parent = waiting.pop()
        children = [pid for pid, its_parent in parents.items() if its_parent == parent]
        found += children
        waiting += children
    return found


def _read_table(path: Path) -> dict[str, int]:
    """Return the lines `name: number kB` of a file of /proc in bytes; empty if the process has ended."""
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    fields = [line.split() for line in lines]
    return {f[0].rstrip(":"): int(f[1]) * 1024 for f in fields if len(f) == 3 and f[2] == "kB" and f[1].isdigit()}
