"""Batches and other values of any nesting: the tensors, the number of samples, and splitting into parts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass, replace
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.core.base.errors import StepError
from holdfast.runtime.tensors.torch_private import version_of

Splitter = Callable[[Any, int], list[Any]]
_PLAIN = (str, bytes, int, float, type, torch.dtype, torch.device, type(None))


def tensors_of(value: Any, levels: int = 1000) -> Iterator[Tensor]:
    """Yield every tensor in lists, tuples, mappings and dataclasses, in order, down to this many levels."""
    if isinstance(value, Tensor):
        yield value
        return
    if levels == 0:
        return
    # Mapping is tested last: the test costs more than all the rest.
    is_sequence = isinstance(value, list | tuple)
    for each in value if is_sequence else value.values() if isinstance(value, Mapping) else _fields(value).values():
        if isinstance(each, Tensor):
            yield each
        elif not isinstance(each, _PLAIN):
            yield from tensors_of(each, levels - 1)


def _fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name; none of anything else."""
    if not is_dataclass(value) or isinstance(value, type):
        return {}
    return {name: getattr(value, name) for name in value.__dataclass_fields__ if hasattr(value, name)}


def members_of(value: Any) -> dict[Any, Any] | None:
    """Return what a list, tuple, mapping or dataclass holds, by position, key or field; None for anything else."""
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    return dict(value.items()) if isinstance(value, Mapping) else _fields(value) or None


def with_members(value: Any, members: dict[Any, Any]) -> Any:
    """Return a copy of a list, tuple, mapping or dataclass with other members."""
    if isinstance(value, list | tuple):
        parts = list(members.values())
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, Mapping):
        try:
            return members if type(value) is dict else type(value)(members)  # type: ignore[call-arg]
        except TypeError:
            return members
    if not hasattr(value, "__dict__"):  # slots
        return replace(value, **members)
    part = copy.copy(value)  # not its constructor, which may compute fields or take other arguments
    vars(part).update(members)
    return part


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

    A 0-dim tensor goes into every part, and so does anything but tensors, arrays and lists as long as the batch.
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
    bounds = accumulate(part_sizes(size, parts), initial=0)
    return [take_samples(batch, size, itemgetter(slice(*each))) for each in pairwise(bounds)]


def part_sizes(size: int, parts: int) -> list[int]:
    """Return how many of `size` samples each part gets, as evenly as possible."""
    parts = min(parts, size)
    return [size // parts + (number < size % parts) for number in range(parts)]


def _holds(value: Any, size: int) -> bool:
    """Return whether a tensor or a list of this length is in it."""
    if isinstance(value, Tensor | np.ndarray):
        return value.ndim > 0 and value.shape[0] == size
    if isinstance(value, list | tuple) and _is_list_of_samples(value, size):
        return True
    return any(_holds(each, size) for each in (members_of(value) or {}).values())


def _is_list_of_samples(value: Any, size: int) -> bool:
    """Return whether a sequence holds one item for each sample. One of tensors that are batches themselves does not.

    Of samples that differ in length, a few may be as long as there are samples.
    """
    if len(value) != size or hasattr(value, "_fields"):
        return False
    items = [v for v in value if isinstance(v, Tensor | np.ndarray | Mapping | list | tuple) or is_dataclass(v)]
    return 2 * sum(_holds(item, size) for item in items) <= len(items)


def take_samples(value: Any, size: int, take: Callable[[Any], Any]) -> Any:
    """Return a copy of a batch of `size` samples with `take` applied to each tensor and list that holds one of each."""
    if isinstance(value, Tensor | np.ndarray):
        return take(value) if value.ndim > 0 and value.shape[0] == size else value
    if isinstance(value, list | tuple) and _is_list_of_samples(value, size):
        return take(value)
    members = members_of(value)
    if members is None:
        return value
    return with_members(value, {name: take_samples(each, size, take) for name, each in members.items()})
