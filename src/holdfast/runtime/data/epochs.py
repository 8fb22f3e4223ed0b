"""The samplers of a loader, and their epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def samplers(loader: Any) -> list[Any]:
    """Return every sampler of a loader, each once."""
    batches = getattr(loader, "batch_sampler", None)
    candidates = [batches, getattr(loader, "sampler", None), getattr(batches, "sampler", None)]
    return [s for s in {id(s): s for s in candidates}.values() if s is not None]


def epoch_setters(loader: Any) -> list[Callable[[int], None]]:
    return [s.set_epoch for s in samplers(loader) if callable(getattr(s, "set_epoch", None))]


def current_epoch(loader: Any) -> int:
    """Return the epoch that was set on its sampler, or 0. A loop that resumes at epoch 5 counts from there."""
    for sampler in samplers(loader):
        if callable(getattr(sampler, "set_epoch", None)) and isinstance(getattr(sampler, "epoch", None), int):
            return int(sampler.epoch)
    return 0
