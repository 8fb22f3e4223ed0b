"""Batches of any nesting: how many samples, which tensors, and cut into parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from holdfast.core.base.errors import StepError
from holdfast.runtime.tensors.torch_private import version_of

Splitter = Callable[[Any, int], list[Any]]


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Every tensor in it, in order."""
    if isinstance(batch, Tensor):
        yield batch
        return
    # A mapping is asked for last: to ask costs more than all the rest.
    plain = isinstance(batch, list | tuple)
    for value in batch if plain else batch.values() if isinstance(batch, Mapping) else ():
        if isinstance(value, Tensor):
            yield value
        else:
            yield from tensors_of(value)


def marks(batch: Any) -> tuple[int, ...]:
    """The version counters of its tensors: they differ once one has been written to in place."""
    return tuple(map(version_of, tensors_of(batch)))


def count_samples(batch: Any) -> int | None:
    """The length of the first tensor's first dimension, or None where there is none."""
    for tensor in tensors_of(batch):
        if tensor.dim() > 0:
            return int(tensor.shape[0])
    return None


def split(batch: Any, parts: int) -> list[Any]:
    """Cut every tensor along its first dimension, as evenly as it goes; never into an empty part.

    A tensor without a dimension, and anything that is not a tensor or a list as long as the batch, goes into every part.
    """
    size = count_samples(batch)
    if size is None:
        raise StepError(
            f"microbatches({parts}): a batch of type {type(batch).__name__} holds no tensor to cut; "
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
        cut = {k: _slice(v, size, start, stop) for k, v in value.items()}
        return cut if type(value) is dict else _rebuild(value, cut)
    if isinstance(value, list | tuple):
        if hasattr(value, "_fields"):
            return type(value)(*(_slice(v, size, start, stop) for v in value))
        if len(value) == size and not any(isinstance(v, Tensor | Mapping | list | tuple) for v in value):
            return value[start:stop]
        return type(value)(_slice(v, size, start, stop) for v in value)
    return value


def _rebuild(value: Any, cut: dict[Any, Any]) -> Any:
    try:
        return type(value)(cut)
    except TypeError:
        return cut
