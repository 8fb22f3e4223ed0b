"""Batches and module outputs of any nesting: their tensors, their rows, and copies with some rows or tokens exchanged."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.runtime.data.bad_rows import is_mask, nonfinite_rows, outlying_rows
from holdfast.runtime.data.split import members_of, take_samples, tensors_of, with_members

_LEVELS = 16
"""arguments and results may hold themselves, so nothing below is looked at"""


def nested_tensors(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in the arguments or results of the user's code."""
    return tensors_of(value, _LEVELS)


def map_leaves(value: Any, change: Callable[[Any], Any], levels: int = _LEVELS) -> Any:
    """Return a copy of a nested value with every leaf changed. Containers of unknown types are leaves."""
    members = members_of(value) if levels else None
    if members is None:
        return change(value)
    return with_members(value, {name: map_leaves(each, change, levels - 1) for name, each in members.items()})


@torch.no_grad()
def is_finite_batch(value: Any, levels: int = _LEVELS) -> bool:
    """Return whether a batch holds no NaN and no Inf, but for masks. False if it has values that cannot be inspected."""
    members = members_of(value) if levels else None
    if members is not None:
        return all(is_finite_batch(each, levels - 1) for each in members.values())
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int | str | bytes | type(None)):
        return True
    try:
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(value)
        return bool(tensor.isfinite().all()) or is_mask(tensor)
    except (RuntimeError, TypeError, ValueError):
        return False


def count_rows(batch: Any) -> int:
    """Return the most frequent first dimension of the tensors of a batch; 0 if no tensor has one."""
    sizes = Counter(int(t.shape[0]) for t in nested_tensors(batch) if t.dim() > 0)
    return max(sizes, key=lambda size: (sizes[size], size), default=0)


def take_rows(batch: Any, rows: Sequence[int]) -> Any:
    """Return a batch of these rows. Tensors of another first dimension are in it whole."""

    def take(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[torch.as_tensor(list(rows), device=value.device)]
        if isinstance(value, np.ndarray):
            return value[list(rows)]
        return type(value)([value[row] for row in rows])

    return take_samples(batch, count_rows(batch), take)


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
    """Return the rows that are not finite, or with `outlying` out of all proportion to the others. Masks have none."""
    size, bad = count_rows(batch), set[int]()
    for tensor in nested_tensors(batch):
        if tensor.is_floating_point() and tensor.dim() > 0 and tensor.shape[0] == size and tensor.numel():
            if is_mask(tensor):
                continue
            found = outlying_rows(tensor) if outlying else nonfinite_rows(tensor)
            bad.update(found.nonzero().flatten().tolist())
    return sorted(bad)
