"""Batches of any nesting: the number of samples, the tensors, and splitting into parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from holdfast.core.base.errors import StepError
from holdfast.runtime.tensors.torch_private import version_of

Splitter = Callable[[Any, int], list[Any]]


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Yield every tensor of a batch, in order."""
    if isinstance(batch, Tensor):
        yield batch
        return
    # Mapping is tested last: the test costs more than all the rest.
    is_sequence = isinstance(batch, list | tuple)
    for value in batch if is_sequence else batch.values() if isinstance(batch, Mapping) else ():
        if isinstance(value, Tensor):
            yield value
        else:
            yield from tensors_of(value)


def tensor_versions(batch: Any) -> tuple[int, ...]:
    """Return the version counters of its tensors. They change when a tensor is written to in place."""
    return tuple(map(version_of, tensors_of(batch)))


def count_samples(batch: Any) -> int | None:
    """Return the first dimension of the first tensor that has one, or None."""
    return next((int(tensor.shape[0]) for tensor in tensors_of(batch) if tensor.dim() > 0), None)


def split(batch: Any, parts: int) -> list[Any]:
    """Split every tensor along its first dimension, as evenly as possible, never into an empty part.

    A 0-dim tensor goes into every part, and so does anything but tensors and lists as long as the batch.
    StepError if the batch holds no tensor to split.
    """
    size = count_samples(batch)
    if size is None:
        raise StepError(
            f"microbatches({parts}): a batch of type {type(batch).__name__} holds no tensor to split; "
            "pass splitter=f, with f(batch, n) returning a list of n batches"
        )
    parts = min(parts, size)
    bounds = [0]
    for piece in torch.tensor_split(torch.empty(size), parts):
        bounds.append(bounds[-1] + len(piece))
    return [_slice(batch, size, bounds[i], bounds[i + 1]) for i in range(parts)]


def _slice(value: Any, size: int, start: int, stop: int) -> Any:
    if isinstance(value, Tensor):
        return value[start:stop] if value.dim() > 0 and value.shape[0] == size else value
    if isinstance(value, Mapping):
        sliced = {k: _slice(v, size, start, stop) for k, v in value.items()}
        if type(value) is dict:
            return sliced
        try:
            return type(value)(sliced)  # type: ignore[call-arg]
        except TypeError:
            return sliced
    if isinstance(value, list | tuple):
        if hasattr(value, "_fields"):
            return type(value)(*(_slice(v, size, start, stop) for v in value))
        if len(value) == size and not any(isinstance(v, Tensor | Mapping | list | tuple) for v in value):
            return value[start:stop]
        return type(value)(_slice(v, size, start, stop) for v in value)
    return value
