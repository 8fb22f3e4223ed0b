"""Find Python containers that grow with every step: the list of losses that keeps the graph of each of them."""

from __future__ import annotations

import gc
from collections import deque
from typing import Any, NamedTuple

from torch import Tensor

_TYPES = (list, dict, set, deque)
_MIN_ITEMS = 64


class Container(NamedTuple):
    """A container that has grown."""

    kind: str
    items: int
    grown: int
    holds: str

    def __str__(self) -> str:
        return f"a {self.kind} with {self.items} items, {self.grown} more than before, the last one {self.holds}"


def count_items() -> dict[int, tuple[str, int]]:
    """Return the length of every container that the garbage collector knows, by identity."""
    return {id(found): (type(found).__name__, len(found)) for found in gc.get_objects() if type(found) in _TYPES}


def find_growing(before: dict[int, tuple[str, int]], steps: int, most: int = 5) -> list[Container]:
    """Return the containers that got an item in at least every second step since `before`, those of tensors first."""
    found = []
    for container in gc.get_objects():
        if type(container) not in _TYPES or container is before:
            continue
        kind, items = type(container).__name__, len(container)
        was_kind, was = before.get(id(container), (kind, 0))
        grown = items - (was if was_kind == kind else 0)
        if grown >= max(_MIN_ITEMS, steps // 2) and (holds := _describe_last(container)) is not None:
            order = "tensor" not in holds, id(container) not in before, -grown
            found.append((order, Container(kind, items, grown, holds)))
    return list(dict.fromkeys(each for _, each in sorted(found)))[:most]


def _describe_last(container: Any) -> str | None:
    """Return what the container holds; None for one of ours."""
    try:
        values = container.values() if type(container) is dict else container
        last = container[-1] if type(container) in (list, deque) else next(iter(values))
    except (IndexError, StopIteration, RuntimeError):  # another thread has changed it
        return "unknown"
    if type(last).__module__.startswith("holdfast."):
        return None
    if not isinstance(last, Tensor):
        return f"of type {type(last).__name__}"
    return "a tensor that keeps its graph" if last.grad_fn is not None else "a tensor"
