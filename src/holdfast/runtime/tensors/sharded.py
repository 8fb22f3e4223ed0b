"""Sharded and replicated tensors (DTensor) as one rank sees them. Nothing here communicates with other ranks."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.runtime.tensors.torch_private import fsdp_modules, fsdp_params, gathered_parameter


def is_sharded(value: Any) -> bool:
    """Return whether it is a DTensor: this rank holds a part of it, or a replica."""
    return callable(getattr(value, "to_local", None))


def mesh_dimensions(value: Any) -> int:
    """Return over how many dimensions of ranks a tensor is spread; 0 for a plain one."""
    mesh = getattr(value, "device_mesh", None)
    return 0 if mesh is None else int(mesh.ndim)


def local(value: Tensor) -> Tensor:
    """Return this rank's part of a tensor, sharing its memory; a plain tensor whole."""
    to_local = getattr(value, "to_local", None)
    if to_local is None:
        return value.detach()
    with torch.no_grad():
        part: Tensor = to_local()
    return part.detach()


def reshard(module: nn.Module) -> None:
    """Free the parameters that FSDP2 has gathered, so that it gathers them again.

    It keeps the root's after an evaluation, and all with `reshard_after_forward=False`.
    """
    for part in fsdp_modules(module):
        part.reshard()


@contextmanager
def zero_gradients(module: nn.Module) -> Iterator[None]:
    """Give every parameter a gradient of zeros in backwards inside the context, whatever they compute.

    Other ranks wait for this rank's gradients, and 0 times the mean of nothing is NaN.
    """
    gathered = [gathered_parameter(param) for param in fsdp_params(module)]
    parameters = {id(p): p for p in (*module.parameters(), *gathered) if p is not None and p.requires_grad}
    handles = [p.register_hook(torch.zeros_like) for p in parameters.values()]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class ShardedParameters:
    """Names a module's parameters.

    While FSDP2 has gathered parameters, the module has whole tensors in place of the sharded ones, which the optimizer
    updates. This class always returns the sharded ones.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        reshard(module)
        self._sharded = {name: p for name, p in module.named_parameters() if is_sharded(p)}

    def named(self, updated: Container[int] = ()) -> Iterator[tuple[str, Tensor]]:
        """Yield names and parameters. `updated` holds the ids of the optimizers' parameters.

        FSDP2 did not gather a parameter that an optimizer holds, so it replaces the sharded one of that name.
        """
        for name, p in self._module.named_parameters():
            if id(p) in updated:
                self._sharded.pop(name, None)
                if is_sharded(p):
                    self._sharded[name] = p
            yield name, self._sharded.get(name, p)
