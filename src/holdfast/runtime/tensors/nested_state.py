"""Nested state (dicts, lists, tuples with tensors in them): apart into tensors and the rest, and back, in place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.runtime.tensors.sharded import is_sharded, local, shard_like

WriteTensor = Callable[[str, Tensor, Tensor], None]
"""what is saved under that name is to be written into the tensor that comes first: at once, or together with others"""


class TensorSlot(NamedTuple):
    """Where a tensor stood in a skeleton."""

    name: str


def split_tensors(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The skeleton of `value`: every dense tensor goes to `tensors` under its path, a sharded one as such; all else is
    copied."""
    if isinstance(value, Tensor) and value.layout is torch.strided:
        tensors[name] = value if is_sharded(value) else value.detach()
        return TensorSlot(name)
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: split_tensors(v, f"{name}.{k}", tensors) for k, v in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(split_tensors(v, f"{name}.{i}", tensors) for i, v in enumerate(value))
    return copy.deepcopy(value)


def write_now(name: str, target: Tensor, saved: Tensor) -> None:
    target.copy_(saved)


@torch.no_grad()
def join_tensors(
    skeleton: Any,
    tensors: dict[str, Tensor],
    current: Any,
    device: torch.device | None,
    *,
    scalars: torch.device | None = None,
    owner: Tensor | None = None,
    put: WriteTensor,
) -> Any:
    """The value a skeleton stands for. A tensor of `current` in the same place is written in place and kept; of a sharded
    one, this rank's part.

    In place matters: optimizers and captured graphs hold on to the tensor, and load_state_dict casts. What is not there yet
    is made on `device`, a number without a dimension on `scalars`, or where it was saved; spread like its `owner` is, where
    it has the shape of this rank's part of that.
    """
    if isinstance(skeleton, TensorSlot):
        saved = tensors[skeleton.name]
        mine = local(current) if isinstance(current, Tensor) else None
        if mine is not None and mine.shape == saved.shape and mine.dtype == saved.dtype:
            put(skeleton.name, mine, saved)
            return current
        home = mine.device if mine is not None else device if saved.dim() else scalars
        made = torch.empty_like(saved, device=home or saved.device)
        put(skeleton.name, made, saved)
        if owner is not None and is_sharded(owner) and saved.dim() and saved.shape == local(owner).shape:
            return shard_like(owner, made)
        return made
    if isinstance(skeleton, dict):
        old = current if isinstance(current, dict) else {}
        return {
            k: join_tensors(v, tensors, old.get(k), device, scalars=scalars, owner=owner, put=put)
            for k, v in skeleton.items()
        }
    if isinstance(skeleton, list | tuple) and not hasattr(skeleton, "_fields"):
        items = current if isinstance(current, list | tuple) else ()
        return type(skeleton)(
            join_tensors(
                v, tensors, items[i] if i < len(items) else None, device, scalars=scalars, owner=owner, put=put
            )
            for i, v in enumerate(skeleton)
        )
    return skeleton.clone() if isinstance(skeleton, Tensor) else copy.deepcopy(skeleton)
