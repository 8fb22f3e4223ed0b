"""How much memory there is for this process: what is free, within what its container or job may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch


def available_bytes(root: Path = Path("/")) -> int:
    """What could be allocated now without swapping or being killed; half of all memory where the system does not say."""
    return min([_free(root), *_allowed(root)])


def free_on(device: torch.device) -> int:
    """What the device has left, whoever has the rest."""
    return int(torch.cuda.mem_get_info(device)[0])


def _free(root: Path) -> int:
    try:
        for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _allowed(root: Path) -> Iterator[int]:
    """What is left under the limit of every control group the process is in. Slurm and Kubernetes set one, and a machine's
    free memory says nothing of it."""
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
            left = _left(folder, *names)
            if left is not None:
                yield left
            if folder == top:
                break


def _left(folder: Path, limit: str, usage: str) -> int | None:
    """Limit less usage; files that were only read count as used there, and give way."""
    try:
        most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
        kinds = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        gives_way = int(kinds.get("total_inactive_file", kinds.get("inactive_file", 0)))
    except (OSError, ValueError):  # no such file, or "max": no limit
        return None
    return max(0, most - used + gives_way)
