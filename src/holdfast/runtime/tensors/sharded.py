"""Tensors that are spread over ranks (DTensor), as one rank sees them: its own part, no other rank asked."""

from __future__ import annotations

import copy
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def is_sharded(value: Any) -> bool:
    """Whether this rank holds only its part of it, or a replica that others hold too."""
    return callable(getattr(value, "to_local", None))


def local(value: Tensor) -> Tensor:
    """This rank's part of a tensor, the very memory; all of a plain one."""
    to_local = getattr(value, "to_local", None)
    if to_local is None:
        return value.detach()
    with torch.no_grad():
        mine: Tensor = to_local()
    return mine.detach()


def shard_like(target: Any, part: Tensor) -> Any:
    """A tensor spread like `target` around other local memory, which may be on the host while the mesh is of devices
    (`from_local` would move it there)."""
    spec: Any = target._spec
    if spec.tensor_meta.dtype != part.dtype:
        spec = copy.copy(spec)
        spec.tensor_meta = spec.tensor_meta._replace(dtype=part.dtype)
    return type(target)(part, spec, requires_grad=False)


def reshard(module: nn.Module) -> None:
    """FSDP2 keeps what it has gathered: the root after an evaluation, all of it where it was told to. It is to let go of
    that and gather anew."""
    for part in fsdp_modules(module):
        part.reshard()


def fsdp_modules(module: nn.Module) -> list[Any]:
    """The parts of a module that FSDP2 gathers, each at once."""
    return [m for m in module.modules() if all(callable(getattr(m, n, None)) for n in ("reshard", "unshard"))]


def drop_accumulated_gradients(module: nn.Module) -> None:
    """What FSDP2 has summed up over the first parts of a step, gathered and not yet averaged, where there is to be no last
    part. `p.grad` does not show it, and nothing public clears it."""
    for held in _held(module):
        held.unsharded_accumulated_grad = None
        if (gathered := getattr(held, "_unsharded_param", None)) is not None:
            gathered.grad = None


def _held(module: nn.Module) -> Iterator[Any]:
    """What FSDP2 keeps for each parameter that it has sharded."""
    for part in module.modules():
        state = getattr(part, "_get_fsdp_state", lambda: None)()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        yield from (p for group in groups if group is not None for p in group.fsdp_params)


@contextmanager
def zero_gradients(module: nn.Module) -> Iterator[None]:
    """A backward inside hands every parameter a gradient of zeros, whatever comes out of it: other ranks wait for this
    rank's gradients, and 0 times a mean over nothing is NaN."""
    gathered = [getattr(held, "_unsharded_param", None) for held in _held(module)]
    parameters = {id(p): p for p in (*module.parameters(), *gathered) if p is not None and p.requires_grad}
    handles = [p.register_hook(torch.zeros_like) for p in parameters.values()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class ShardedParameters:
    """A module's parameters by name.

    While FSDP2 has gathered some, others stand in their places; the optimizer, and we, mean those that were there first.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        reshard(module)
        self._sharded = {name: p for name, p in module.named_parameters() if is_sharded(p)}

    def named(self, updated: Container[int] = ()) -> Iterator[tuple[str, Tensor]]:
        """`updated`: the ids of what optimizers update, which is never what was gathered; a new one takes its place."""
        for name, p in self._module.named_parameters():
            if id(p) in updated:
                self._sharded.pop(name, None)
                if is_sharded(p):
                    self._sharded[name] = p
            yield name, self._sharded.get(name, p)
