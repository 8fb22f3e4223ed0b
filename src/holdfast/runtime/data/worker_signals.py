"""Loader workers outlive a SIGTERM that is not from their own process.

Slurm sends SIGTERM to every process of a job. Without its workers the training could not make the steps up to its last
checkpoint. torch ends a worker at any SIGTERM, so the worker takes the signal from torch's handler.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader


class OutlivingStart:
    """Replaces a loader's `worker_init_fn`."""

    def __init__(self, init: Callable[[int], Any] | None) -> None:
        self._init = init

    def __call__(self, worker_id: int) -> None:
        # A blocked signal waits for the thread, which alone can learn who sent it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_with_parent, name="holdfast-sigterm", daemon=True).start()
        if self._init is not None:
            self._init(worker_id)


def _end_with_parent() -> None:
    """End this worker when its parent sends SIGTERM. If the parent is gone, torch ends the worker."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)  # as torch's handler does


def outliving(init: Callable[[int], Any] | None) -> Callable[[int], Any] | None:
    """Return a `worker_init_fn` for workers that outlive SIGTERM if this process handles it; else `init`."""
    handles = callable(signal.getsignal(signal.SIGTERM)) and hasattr(signal, "sigwaitinfo")
    return OutlivingStart(init) if handles else init


def iterate(loader: Iterable[Any]) -> Iterator[Any]:
    """Return `iter(loader)`, whose workers outlive SIGTERM if this process handles it."""
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return iter(loader)
    init = loader.worker_init_fn
    loader.__dict__["worker_init_fn"] = outliving(init)  # the loader refuses a changed attribute
    try:
        return iter(loader)
    finally:
        loader.__dict__["worker_init_fn"] = init
