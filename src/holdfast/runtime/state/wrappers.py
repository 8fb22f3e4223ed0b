"""The wrappers around a user's objects: DistributedDataParallel and torch.compile, and those of Accelerate and Fabric.

Accelerate and Fabric are recognised by the names of their classes, and are not imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from holdfast.runtime.tensors.torch_private import ddp_bucket_order, order_ddp_buckets, require, wrapped_module


def unwrap(module: nn.Module) -> nn.Module:
    """Return the user's own module."""
    return layers(module)[-1]


def full_name(*parts: str) -> str:
    """Return a qualified name from its parts, of which some may be empty."""
    return ".".join(filter(None, parts))


def named_modules(roots: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module of these models, with its name in them."""
    return ((full_name(prefix, path), module) for prefix, root in roots for path, module in root.named_modules())


def broadcasts_buffers(module: nn.Module) -> bool | None:
    """Return whether DistributedDataParallel will broadcast rank 0's buffers at the next forward; None if it has none.

    It does not after a forward without gradients, so an evaluation changes what the next step does.
    """
    for layer in layers(module):
        if getattr(layer, "modules_buffers", None):
            return bool(require(layer, "require_forward_param_sync"))
    return None


def set_broadcasts_buffers(module: nn.Module, flag: bool | None) -> None:
    """Restore what `broadcasts_buffers` returned."""
    for layer in layers(module):
        if flag is not None and hasattr(layer, "require_forward_param_sync"):
            layer.require_forward_param_sync = flag  # type: ignore[assignment]


def gradient_order(module: nn.Module) -> list[int] | None:
    """Return the order in which DistributedDataParallel sums gradients; None if it has not chosen one.

    On three or more ranks the order decides about the last bits of a sum.
    """
    return next((ddp_bucket_order(layer) for layer in layers(module) if hasattr(layer, "reducer")), None)


def set_gradient_order(module: nn.Module, order: list[int] | None) -> None:
    """Restore what `gradient_order` returned, in a process that has not chosen one. All ranks call it."""
    for layer in layers(module):
        if order is not None and hasattr(layer, "reducer"):
            order_ddp_buckets(layer, order)


def layers(module: nn.Module) -> list[nn.Module]:
    """Return the module and those it wraps, the user's own last."""
    layers = [module]
    while (inner := wrapped_module(layers[-1])) is not None:
        layers.append(inner)
    return layers


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside Accelerate's or Fabric's."""
    while _is_a(optimizer, "AcceleratedOptimizer") or _is_a(optimizer, "_FabricOptimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def scaler_inside(optimizer: Any) -> Any:
    """Return the GradScaler that Accelerate's or Fabric's optimizer steps with, or None."""
    if _is_a(optimizer, "_FabricOptimizer"):
        return getattr(vars(optimizer)["_strategy"].precision, "scaler", None)
    return optimizer.scaler if _is_a(optimizer, "AcceleratedOptimizer") else None


def unwrap_scheduler(scheduler: Any) -> Any:
    """Return the scheduler inside Accelerate's."""
    return scheduler.scheduler if _is_a(scheduler, "AcceleratedScheduler") else scheduler


def _is_a(value: Any, name: str) -> bool:
    return any(cls.__name__ == name for cls in type(value).__mro__)
