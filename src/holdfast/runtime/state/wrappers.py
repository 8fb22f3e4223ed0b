"""The wrappers around a user's module, DistributedDataParallel and torch.compile, and their part of a run's state."""

from __future__ import annotations

from torch import nn

from holdfast.runtime.tensors.torch_private import require, wrapped_module


def unwrap(module: nn.Module) -> nn.Module:
    """Return the user's own module."""
    return _layers(module)[-1]


def broadcasts_buffers(module: nn.Module) -> bool | None:
    """Return whether DistributedDataParallel will broadcast rank 0's buffers at the next forward; None if it has none.

    It does not after a forward without gradients, so an evaluation changes what the next step does.
    """
    for layer in _layers(module):
        if getattr(layer, "modules_buffers", None):
            return bool(require(layer, "require_forward_param_sync"))
    return None


def set_broadcasts_buffers(module: nn.Module, flag: bool | None) -> None:
    """Restore what `broadcasts_buffers` returned."""
    for layer in _layers(module):
        if flag is not None and hasattr(layer, "require_forward_param_sync"):
            layer.require_forward_param_sync = flag  # type: ignore[assignment]


def _layers(module: nn.Module) -> list[nn.Module]:
    """Return the module and those it wraps, the user's own last."""
    layers = [module]
    while (inner := wrapped_module(layers[-1])) is not None:
        layers.append(inner)
    return layers
