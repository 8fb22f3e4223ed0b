"""Nested state (dicts, lists and tuples that hold tensors): split into tensors and the rest, and joined again in place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.runtime.tensors.sharded import is_sharded, local
from holdfast.runtime.tensors.torch_private import shard_like

WriteTensor = Callable[[str, Tensor, Tensor], None]
"""writes the value saved under a name into a tensor, at once or later: (name, target, saved)"""


class TensorSlot(NamedTuple):
    """Marks the place of a tensor in a skeleton."""

    name: str


def split_tensors(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return the skeleton of `value`, and add its dense tensors to `tensors` by their paths. All else is copied."""
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
    """Return the value of a skeleton. A tensor of `current` in the same place is written in place and kept; of a sharded
    one, the local part.

    In place matters: optimizers and captured graphs hold the tensor, and load_state_dict casts. New tensors are made on
    `device`, 0-dim ones on `scalars`, or on the device they were saved from. They are sharded like `owner` if they have
    the shape of its local part.
    """
    if isinstance(skeleton, TensorSlot):
        saved = tensors[skeleton.name]
        target = local(current) if isinstance(current, Tensor) else None
        if target is not None and target.shape == saved.shape and target.dtype == saved.dtype:
            put(skeleton.name, target, saved)
            return current
        home = target.device if target is not None else device if saved.dim() else scalars
        made = torch.empty_like(saved, device=home or saved.device)
        put(skeleton.name, made, saved)
        if owner is not None and is_sharded(owner) and saved.dim() and saved.shape == local(owner).shape:
            return shard_like(owner, made)
        return made

    def join(part: Any, now: Any) -> Any:
        return join_tensors(part, tensors, now, device, scalars=scalars, owner=owner, put=put)

    if isinstance(skeleton, dict):
        old = current if isinstance(current, dict) else {}
        return {k: join(v, old.get(k)) for k, v in skeleton.items()}
    if isinstance(skeleton, list | tuple) and not hasattr(skeleton, "_fields"):
        items = current if isinstance(current, list | tuple) else ()
        return type(skeleton)(join(v, items[i] if i < len(items) else None) for i, v in enumerate(skeleton))
    return skeleton.clone() if isinstance(skeleton, Tensor) else copy.deepcopy(skeleton)


def slot_problem(skeleton: Any, name: str, tensors: Mapping[str, Tensor]) -> str | None:
    """Return the first slot that names a tensor which `split_tensors` would not have put there; None if there is none."""
    if isinstance(skeleton, TensorSlot):
        is_own = skeleton.name == name and name in tensors
        return None if is_own else f"{name[:80]} should be a tensor of its own, but is {str(skeleton.name)[:80]}"
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(skeleton, dict):
        items = skeleton.items()
    elif isinstance(skeleton, list | tuple) and not hasattr(skeleton, "_fields"):
        items = enumerate(skeleton)
    problems = (slot_problem(value, f"{name}.{key}", tensors) for key, value in items)
    return next((problem for problem in problems if problem is not None), None)


def can_replace(saved: Any, live: Any) -> bool:
    """Return whether a saved value is of the same kind as the live one. None is of any kind, and a tensor is a number."""
    if saved is None or live is None:
        return True
    kind = _kind(live)
    if kind != _kind(saved):
        return False
    if kind == "sequence" and len(saved) == len(live):
        return all(map(can_replace, saved, live))
    return kind != "mapping" or all(can_replace(value, live.get(key)) for key, value in saved.items())


def _kind(value: Any) -> str:
    kinds = ((Tensor | TensorSlot | int | float | complex, "number"), (str, "text"), (dict, "mapping"))
    return next((kind for types, kind in kinds if isinstance(value, types)), "sequence" if _is_sequence(value) else "")


def _is_sequence(value: Any) -> bool:
    return isinstance(value, list | tuple)
