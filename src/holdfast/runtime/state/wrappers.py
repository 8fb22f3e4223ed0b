"""What stands around a user's module: DistributedDataParallel, torch.compile. And what of it belongs to a run's state."""

from __future__ import annotations

from torch import nn

_INSIDE = {"DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}


def unwrap(module: nn.Module) -> nn.Module:
    """The user's own."""
    return _layers(module)[-1]


def broadcasts_buffers(module: nn.Module) -> bool | None:
    """Whether DistributedDataParallel will hand out the first rank's buffers at the next forward: it does not after a
    forward without gradients, so that an evaluation has a say in what follows. None where there are none to hand out."""
    for layer in _layers(module):
        if getattr(layer, "modules_buffers", None):
            flag = getattr(layer, "require_forward_param_sync", None)
            return None if flag is None else bool(flag)
    return None


def set_broadcasts_buffers(module: nn.Module, flag: bool | None) -> None:
    for layer in _layers(module):
        if flag is not None and hasattr(layer, "require_forward_param_sync"):
            layer.require_forward_param_sync = flag  # type: ignore[assignment]


def _layers(module: nn.Module) -> list[nn.Module]:
    """A module and what it wraps, the user's own last."""
    found = [module]
    while (inner := getattr(found[-1], _INSIDE.get(type(found[-1]).__name__, ""), None)) is not None:
        found.append(inner)
    return found
