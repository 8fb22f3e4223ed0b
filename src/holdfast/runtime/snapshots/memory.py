"""How much memory this process may still allocate: the free memory, within the limits of its container or job."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that can be allocated without swapping or being killed; half of all memory if unknown."""
    return min([_free_bytes(root), *_cgroup_bytes(root)])


def free_device_bytes(device: torch.device) -> int:
    """Return the free memory of a CUDA device, counting every process on it."""
    return int(torch.cuda.mem_get_info(device)[0])


def _free_bytes(root: Path) -> int:
    try:
        for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _cgroup_bytes(root: Path) -> Iterator[int]:
    """Yield the bytes left under the limit of each control group of the process. Slurm and Kubernetes set such limits."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if controllers == "":
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = top / path.strip("/")
        for folder in (group, *group.parents):
            left = _bytes_left(folder, *names)
            if left is not None:
                yield left
            if folder == top:
                break


def _bytes_left(folder: Path, limit_name: str, usage_name: str) -> int | None:
    """Return limit minus usage. The page cache counts as usage, but the kernel reclaims its inactive part."""
    try:
        limit, used = int((folder / limit_name).read_text()), int((folder / usage_name).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        reclaimable = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    except (OSError, ValueError):  # no such file, or "max", which means no limit
        return None
    return max(0, limit - used + reclaimable)
