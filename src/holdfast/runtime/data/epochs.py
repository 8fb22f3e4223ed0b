"""The samplers of a loader, and their epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def samplers(loader: Any) -> list[Any]:
    """Return every sampler of a loader, and those they wrap, each once."""
    found: dict[int, Any] = {}
    owners = [loader]
    while owners:
        owner = owners.pop(0)
        for name in ("batch_sampler", "sampler"):
            sampler = getattr(owner, name, None)
            if sampler is not None and id(sampler) not in found:
                found[id(sampler)] = sampler
                owners.append(sampler)
    return list(found.values())


def epoch_setters(loader: Any) -> list[Callable[[int], None]]:
    return [s.set_epoch for s in samplers(loader) if callable(getattr(s, "set_epoch", None))]


def current_epoch(loader: Any) -> int:
    """Return the epoch that was set on its sampler, or 0. A loop that resumes at epoch 5 counts from there."""
    for sampler in samplers(loader):
        if callable(getattr(sampler, "set_epoch", None)) and isinstance(getattr(sampler, "epoch", None), int):
            return int(sampler.epoch)
    return 0
