"""Batches and module outputs of any nesting: their tensors, their rows, and copies with some rows or tokens exchanged."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from holdfast.runtime.data.bad_rows import nonfinite_rows, outlying_rows

_MAX_DEPTH = 16
_PLAIN = (str, bytes, int, float, type, torch.dtype, torch.device, type(None))


def nested_tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Yield every tensor in lists, tuples, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            if isinstance(each, Tensor):
                yield each
            elif depth < _MAX_DEPTH and not isinstance(each, _PLAIN):
                yield from nested_tensors(each, depth + 1)
    elif depth < _MAX_DEPTH and not isinstance(value, _PLAIN):
        for _, each in _members(value):
            yield from nested_tensors(each, depth + 1)


def _members(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value):
        return [(f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    return []


def map_leaves(value: Any, change: Callable[[Any], Any], depth: int = 0) -> Any:
    """Return a copy of a nested value with every leaf changed. Containers of unknown types are leaves."""
    members = [] if depth >= _MAX_DEPTH or isinstance(value, type) else _members(value)
    if not members:
        return change(value)
    changed = {name: map_leaves(each, change, depth + 1) for name, each in members}
    if dataclasses.is_dataclass(value) and not isinstance(value, Mapping):
        return dataclasses.replace(value, **changed)  # type: ignore[type-var]
    if isinstance(value, Mapping):
        try:
            return type(value)(changed)  # type: ignore[call-arg]
        except TypeError:
            return changed
    parts = list(changed.values())
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def count_rows(batch: Any) -> int:
    """Return the most frequent first dimension of the tensors of a batch; 0 if no tensor has one."""
    sizes = Counter(int(t.shape[0]) for t in nested_tensors(batch) if t.dim() > 0)
    return max(sizes, key=lambda size: (sizes[size], size), default=0)


def take_rows(batch: Any, rows: Sequence[int]) -> Any:
    """Return a batch of these rows. Tensors of another first dimension are in it whole."""
    size = count_rows(batch)

    def change(leaf: Any) -> Any:
        is_batch = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == size
        return leaf[torch.as_tensor(list(rows), device=leaf.device)] if is_batch else leaf

    is_list = isinstance(batch, list) and len(batch) == size and not any(isinstance(v, Tensor) for v in batch)
    return [batch[row] for row in rows] if is_list else map_leaves(batch, change)


def count_tokens(batch: Any) -> int:
    """Return the length of the sequences of an integer tensor with rows; 0 if the batch has none."""
    size = count_rows(batch)
    integers = (t for t in nested_tensors(batch) if not t.is_floating_point() and t.dtype is not torch.bool)
    return next((int(t.shape[1]) for t in integers if t.dim() >= 2 and t.shape[0] == size), 0)


def exchange_tokens(sample: Any, healthy: Any, keep: Sequence[int]) -> Any:
    """Return the healthy batch with the tokens of `sample` at the kept positions. Both have one row and equal shapes."""
    tokens = count_tokens(sample)
    others = iter(list(nested_tensors(healthy)))

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        other = next(others)
        if leaf.dim() < 2 or leaf.shape[1] != tokens:
            return other
        mixed = other.clone()
        index = torch.as_tensor(list(keep), device=leaf.device)
        mixed[:, index] = leaf[:, index]
        return mixed

    return map_leaves(sample, change)


def same_shapes(a: Any, b: Any) -> bool:
    """Return whether two batches hold tensors of equal shapes and dtypes, in the same order."""
    return [(t.shape, t.dtype) for t in nested_tensors(a)] == [(t.shape, t.dtype) for t in nested_tensors(b)]


@torch.no_grad()
def bad_rows(batch: Any, *, outlying: bool = False) -> list[int]:
    """Return the rows that are not finite, or with `outlying` out of all proportion to the others."""
    size, bad = count_rows(batch), set[int]()
    for tensor in nested_tensors(batch):
        if tensor.is_floating_point() and tensor.dim() > 0 and tensor.shape[0] == size and tensor.numel():
            found = outlying_rows(tensor) if outlying else nonfinite_rows(tensor)
            bad.update(found.nonzero().flatten().tolist())
    return sorted(bad)
