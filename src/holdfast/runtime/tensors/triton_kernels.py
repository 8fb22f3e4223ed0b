"""Kernels of our own, built when they are first needed. Where there is no Triton, or no compiler for it, torch's own
operations do what they would have done."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

log = logging.getLogger("holdfast")

T = TypeVar("T")


class OptionalKernel(Generic[T]):
    """`load` builds it and tries it out, on a device. `without` says what is slower where that fails."""

    def __init__(self, load: Callable[[torch.device], T], without: str) -> None:
        self._load, self._without = load, without
        self._tried = False
        self._found: T | None = None

    def get(self, device: torch.device) -> T | None:
        """The kernel, or None. Tried once in the life of a process."""
        if not self._tried:
            self._tried = True
            try:
                with torch.cuda.device(device):
                    self._found = self._load(device)
            except Exception as error:  # whatever keeps it from being built
                self.disable(error)
        return self._found

    def disable(self, error: Exception) -> None:
        """It cannot be used after all: a variant of it could not be built."""
        log.info("%s: %s: %s", self._without, type(error).__name__, str(error)[:200])
        self._tried, self._found = True, None
