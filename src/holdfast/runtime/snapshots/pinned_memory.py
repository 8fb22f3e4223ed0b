"""Host memory that a GPU copies to and from at full speed: exactly as large as asked for, made off the training thread.

torch's own allocator of page-locked memory rounds up to a power of two (17 GB become 32), and its caller waits a third of a
second or more for every gigabyte. Here ordinary memory is touched and then registered with CUDA, on whichever thread asks.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from holdfast.runtime.snapshots.layout import PIECE

PART = PIECE
"""bytes registered by one call: no kernel is launched meanwhile (3 ms of them), and no copy may cross two"""
TOUCHING = 4
"""threads that touch the memory: for one alone it takes ten times as long as to register it"""
FEW = 1 << 20
"""below this torch's allocator serves as well: what it rounds up does not matter"""


class Pages(mmap.mmap):
    """Anonymous memory; a child process does not get it. Registered parts are given back to CUDA before it goes."""

    def __new__(cls, nbytes: int) -> Pages:
        return super().__new__(cls, -1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def __init__(self, nbytes: int) -> None:
        self._registered: list[int] = []
        self._device = torch.device("cpu")
        self._owner = os.getpid()
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            with contextlib.suppress(OSError, AttributeError):
                self.madvise(getattr(mmap, advice))

    def lock(self, address: int, device: torch.device) -> bool:
        """Touch and register all of it; False, and nothing is registered, where that is refused."""
        self._device = device
        parts = [(address + start, min(PART, len(self) - start)) for start in range(0, len(self), PART)]
        with ThreadPoolExecutor(TOUCHING, thread_name_prefix="holdfast-touch") as threads:
            list(
                threads.map(lambda part: ctypes.memset(part[0], 0, part[1]), parts)
            )  # lets other threads run meanwhile
        for start, size in parts:
            if not register(start, size, device):
                self.unlock()
                return False
            self._registered.append(start)
        return True

    def unlock(self) -> None:
        while self._registered:
            unregister(self._registered.pop(), self._device)

    def __del__(self) -> None:
        if self._registered and self._owner == os.getpid() and not sys.is_finalizing():
            with contextlib.suppress(Exception):
                self.unlock()


def locked(nbytes: int, device: torch.device) -> tuple[Tensor, str | None]:
    """That many bytes of zeros for copies to and from `device`; and a word about it where they will be slow."""
    if nbytes >= FEW:
        pages = Pages(nbytes)
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        if pages.lock(memory.data_ptr(), device):
            return memory, None
        del memory, pages
    try:
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True), None
    except RuntimeError as error:
        said = (
            f"{nbytes / 1e9:.2f} GB of host memory could not be page-locked ({str(error).splitlines()[0]}): snapshots are "
            "copied slowly, and training waits for it; raise the limit on locked memory (ulimit -l), or lower "
            "[snapshot] memory_gb"
        )
        return torch.zeros(nbytes, dtype=torch.uint8), said


# ---- CUDA


def register(address: int, nbytes: int, device: torch.device) -> bool:
    with torch.cuda.device(device):  # or a context would be made on the first device of the machine
        return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)) == 0  # type: ignore[no-untyped-call]


def unregister(address: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
