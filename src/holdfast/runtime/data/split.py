"""Batches of any nesting: the number of samples, the tensors, and splitting into parts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass, replace
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
    for value in batch if is_sequence else batch.values() if isinstance(batch, Mapping) else _fields(batch).values():
        if isinstance(value, Tensor):
            yield value
        else:
            yield from tensors_of(value)


def _fields(batch: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name; none of anything else."""
    if not is_dataclass(batch) or isinstance(batch, type):
        return {}
    return {name: getattr(batch, name) for name in batch.__dataclass_fields__ if hasattr(batch, name)}


def named_tensors(batch: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a batch with the key or field that holds it; "" if it is in a sequence."""
    if isinstance(batch, Tensor):
        yield name, batch
        return
    named: Any = batch.items() if isinstance(batch, Mapping) else _fields(batch).items()
    if isinstance(batch, list | tuple):
        named = zip(getattr(batch, "_fields", [""] * len(batch)), batch, strict=True)
    for key, value in named:
        yield from named_tensors(value, str(key))


def tensor_versions(batch: Any) -> tuple[int, ...]:
    """Return the version counters of its tensors. They change when a tensor is written to in place."""
    return tuple(map(version_of, tensors_of(batch)))


def count_samples(batch: Any) -> int | None:
    """Return the first dimension of the first tensor that has one, or None."""
    return next((int(tensor.shape[0]) for tensor in tensors_of(batch) if tensor.dim() > 0), None)


def split(batch: Any, parts: int, size: int | None = None) -> list[Any]:
    """Split every tensor along its first dimension, as evenly as possible, never into an empty part.

    A 0-dim tensor goes into every part, and so does anything but tensors and lists as long as the batch.
    size: the number of samples, if known; otherwise it is the first dimension of the first tensor.
    StepError if the batch holds no tensor to split.
    """
    known = size
    size = count_samples(batch) if known is None else known
    if size is None:
        raise StepError(
            f"microbatches({parts}): a batch of type {type(batch).__name__} holds no tensor to split; "
            "pass splitter=f, with f(batch, n) returning a list of n batches"
        )
    if known is not None and not _holds(batch, known):
        raise StepError(
            f"a batch of type {type(batch).__name__} has {known} samples, and no tensor or list in it has that length: it "
            "is not known where to split it; pass a splitter, with f(batch, n) returning a list of n batches"
        )
    parts = min(parts, size)
    bounds = [0]
    for piece in torch.tensor_split(torch.empty(size), parts):
        bounds.append(bounds[-1] + len(piece))
    return [_slice(batch, size, bounds[i], bounds[i + 1]) for i in range(parts)]


def _holds(value: Any, size: int) -> bool:
    """Return whether a tensor or a list of this length is in it."""
    if isinstance(value, Tensor):
        return value.dim() > 0 and value.shape[0] == size
    if isinstance(value, list | tuple):
        return _is_list_of_samples(value, size) or any(_holds(v, size) for v in value)
    fields = value.values() if isinstance(value, Mapping) else _fields(value).values()
    return any(_holds(v, size) for v in fields)


def _is_list_of_samples(value: Any, size: int) -> bool:
    """Return whether a sequence holds one item for each sample. One of tensors that are batches themselves does not."""
    if len(value) != size or hasattr(value, "_fields"):
        return False
    return not any(_holds(v, size) for v in value if isinstance(v, Tensor | Mapping | list | tuple) or is_dataclass(v))


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
        if _is_list_of_samples(value, size):
            return value[start:stop]
        return type(value)(_slice(v, size, start, stop) for v in value)
    if fields := _fields(value):
        sliced = {name: _slice(field, size, start, stop) for name, field in fields.items()}
        if not hasattr(value, "__dict__"):  # slots
            return replace(value, **sliced)
        part = copy.copy(value)  # not its constructor, which may compute fields or take other arguments
        vars(part).update(sliced)
        return part
    return value
