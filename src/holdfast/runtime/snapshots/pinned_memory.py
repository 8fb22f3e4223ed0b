"""Pinned (page-locked) host memory of exactly the size asked for, allocated off the training thread.

torch's pinned allocator rounds up to a power of two (17 GB become 32). Its caller waits a third of a second or more for
each gigabyte. Here ordinary memory is touched and then registered with CUDA, on whichever thread asks.
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

from holdfast.runtime.snapshots.layout import PIECE_BYTES

REGISTER_BYTES = PIECE_BYTES
"""bytes registered by one call: no kernel is launched meanwhile (3 ms each), and no copy may cross two"""
TOUCH_THREADS = 4
"""with one thread, touching memory takes ten times as long as registering it"""
MIN_REGISTERED_BYTES = 1 << 20
"""below this torch's allocator is used: the memory it wastes does not matter"""


class PinnedPages(mmap.mmap):
    """Anonymous memory that child processes do not inherit. Unregisters itself from CUDA before it is freed."""

    def __new__(cls, nbytes: int) -> PinnedPages:
        return super().__new__(cls, -1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def __init__(self, nbytes: int) -> None:
        self._registered: list[int] = []
        self._device = torch.device("cpu")
        self._owner = os.getpid()
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            with contextlib.suppress(OSError, AttributeError):
                self.madvise(getattr(mmap, advice))

    def pin(self, address: int, device: torch.device) -> bool:
        """Touch and register all of it. Returns False, with nothing registered, if CUDA refuses."""
        self._device = device
        parts = [
            (address + start, min(REGISTER_BYTES, len(self) - start)) for start in range(0, len(self), REGISTER_BYTES)
        ]
        with ThreadPoolExecutor(TOUCH_THREADS, thread_name_prefix="holdfast-touch") as threads:
            list(threads.map(lambda part: ctypes.memset(part[0], 0, part[1]), parts))  # releases the GIL
        for start, size in parts:
            if not register(start, size, device):
                self.unpin()
                return False
            self._registered.append(start)
        return True

    def unpin(self) -> None:
        while self._registered:
            unregister(self._registered.pop(), self._device)

    def __del__(self) -> None:
        if self._registered and self._owner == os.getpid() and not sys.is_finalizing():
            with contextlib.suppress(Exception):
                self.unpin()


def allocate_pinned(nbytes: int, device: torch.device) -> tuple[Tensor, str | None]:
    """Return that many zero bytes for copies to and from `device`, and a warning if they could not be pinned."""
    if nbytes >= MIN_REGISTERED_BYTES:
        pages = PinnedPages(nbytes)
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        if pages.pin(memory.data_ptr(), device):
            return memory, None
        del memory, pages
    try:
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True), None
    except RuntimeError as error:
        warning = (
            f"could not pin {nbytes / 1e9:.2f} GB of host memory ({str(error).splitlines()[0]}): snapshots are copied "
            "slowly and training waits for them; raise the limit on locked memory (ulimit -l), or lower [snapshot] memory_gb"
        )
        return torch.zeros(nbytes, dtype=torch.uint8), warning


def register(address: int, nbytes: int, device: torch.device) -> bool:
    with torch.cuda.device(device):  # otherwise CUDA creates a context on the machine's first device
        return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)) == 0  # type: ignore[no-untyped-call]


def unregister(address: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
