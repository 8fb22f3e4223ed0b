"""Triton kernels, built when first needed. Without Triton or its compiler, torch operations do the same work."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

log = logging.getLogger("holdfast")

T = TypeVar("T")


class OptionalKernel(Generic[T]):
    """Builds a kernel once per process. `load` builds it and checks its results on a device; `fallback` says in the log
    what happens without it."""

    def __init__(self, load: Callable[[torch.device], T], fallback: str) -> None:
        self._load, self._fallback = load, fallback
        self._tried = False
        self._kernel: T | None = None

    def get(self, device: torch.device) -> T | None:
        """Return the kernel, or None if it cannot be built."""
        if not self._tried:
            self._tried = True
            try:
                with torch.cuda.device(device):
                    self._kernel = self._load(device)
            except Exception as error:  # anything: no Triton, no compiler, an unsupported device
                self.disable(error)
        return self._kernel

    def disable(self, error: Exception) -> None:
        """Stop using the kernel, because a variant of it could not be built."""
        log.info("holdfast: %s: %s: %s", self._fallback, type(error).__name__, str(error)[:200])
        self._tried, self._kernel = True, None
