"""Limits memory on any device: counts the bytes of real tensors, and raises torch's own error when they exceed a budget.

Operations of forward, backward and optimizer pass through a dispatch mode, which sees every tensor that they make. It does
not see memory that a kernel uses inside itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from holdfast.runtime.tensors.torch_private import TorchDispatchMode


class MemoryLimit(TorchDispatchMode):  # type: ignore[misc]
    """Raises torch.OutOfMemoryError inside the context if tensors made in it hold more than `nbytes` together.

    nbytes: None sets no limit. It may be changed at any time. Tensors that were made outside the context do not count.
    """

    def __init__(self, nbytes: int | None = None) -> None:
        super().__init__()
        self.nbytes = nbytes
        self.peak = 0
        """the most bytes alive at once so far"""
        self.raised = 0
        """how many times memory ran out"""
        self._alive: dict[int, tuple[Any, int]] = {}
        """weak reference and bytes of each storage, by address"""

    def live_bytes(self) -> int:
        """Return the bytes of the tensors made in the context that are still alive."""
        self._alive = {key: each for key, each in self._alive.items() if not each[0].expired()}
        return sum(nbytes for _, nbytes in self._alive.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {_address(t) for t in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        made = {_address(t): t.untyped_storage() for t in _tensors(result)}
        new = {key: storage for key, storage in made.items() if key and key not in inputs}
        before = self.live_bytes()
        asked = sum(storage.nbytes() for storage in new.values())
        if self.nbytes is not None and new and before + asked > self.nbytes:
            self.raised += 1
            raise torch.OutOfMemoryError(
                f"out of memory: tried to allocate {asked} bytes. The limit is {self.nbytes} bytes, of which {before} are "
                "allocated"
            )
        weak: Any = StorageWeakRef
        self._alive |= {key: (weak(storage), storage.nbytes()) for key, storage in new.items()}
        self.peak = max(self.peak, before + asked)
        return result


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the dense tensors in arguments or results."""
    if isinstance(value, Tensor):
        if value.layout is torch.strided:
            yield value
    elif isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


def _address(tensor: Tensor) -> int:
    """Return what identifies the memory of a tensor; 0 if it has none."""
    return int(tensor.untyped_storage().data_ptr())
