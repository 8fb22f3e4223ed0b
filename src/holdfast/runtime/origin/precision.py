"""Runs a step, a module or an op in another precision."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import backward  # by name: Guard.wrap counts what the loop calls as torch.autograd.backward
from torch.overrides import TorchFunctionMode

from holdfast.runtime.origin.batches import map_leaves, nested_tensors
from holdfast.runtime.origin.ranges import extremes, values_of
from holdfast.runtime.tensors.sharded import is_sharded
from holdfast.runtime.tensors.torch_private import name_without_wrappers, running_node

LOW = (torch.float16, torch.bfloat16)
_MAX_CALLS = 4
_OUTLYING = 1e4
"""a weight that is larger than this, and this many times the next of its tensor, is none that training makes"""


class _RaisePrecision(TorchFunctionMode):
    """Turns every cast to a lower precision into one to `dtype`, and autocast off."""

    def __init__(self, dtype: torch.dtype, devices: set[str]) -> None:
        super().__init__()
        self._dtype = dtype
        self._devices = devices

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for device in self._devices:
            if torch.is_autocast_enabled(device):
                torch.set_autocast_enabled(device, False)
        if func in (Tensor.half, Tensor.bfloat16, Tensor.float):
            return args[0].to(self._dtype)
        return func(*map(self._change, args), **{name: self._change(value) for name, value in (kwargs or {}).items()})

    def _change(self, value: Any) -> Any:
        lower = (*LOW, torch.float32) if self._dtype is torch.float64 else LOW
        return self._dtype if isinstance(value, torch.dtype) and value in lower else value


class Outlier(NamedTuple):
    """A single weight that is out of all proportion to its tensor, as a flipped bit leaves it."""

    text: str
    values: Tensor
    """those of its parameter, in the same memory"""
    place: tuple[int, ...]


def find_outlier(models: Mapping[str, nn.Module]) -> Outlier | None:
    """Return the first such weight of finite ones, or None."""
    for model in models.values():
        for name, parameter in model.named_parameters():
            value = values_of(parameter)
            if value is None or value.numel() < 2 or not _OUTLYING < extremes(value).largest < math.inf:
                continue
            (largest, second), at = value.flatten().abs().float().topk(2)
            if float(largest) > _OUTLYING * max(float(second), 1.0):
                sizes = f"one value of {float(largest):.3g}, and the next largest is {float(second):.3g}"
                place = tuple(map(int, torch.unravel_index(at[0], value.shape)))
                return Outlier(f"{name_without_wrappers(name)} has {sizes}", value, place)
    return None


def raise_floats(value: Any, dtype: torch.dtype, device: str | None = None) -> Any:
    """Return a copy of a nested value with its floating-point tensors in `dtype`, on `device` if given."""

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        target = leaf.device if device is None else torch.device(device)
        return leaf.to(target, dtype) if leaf.is_floating_point() else leaf.to(target)

    return map_leaves(value, change)


@contextmanager
def in_float32(models: Mapping[str, nn.Module]) -> Iterator[None]:
    """Run the models in float32: parameters, buffers and casts of the user's code. The tensors are put back at the end.

    ValueError if parameters are sharded.
    """
    tensors = [t for model in models.values() for t in (*model.parameters(), *model.buffers())]
    if any(is_sharded(t) for t in tensors):
        raise ValueError("the parameters are sharded")
    low = [(t, t.data, t.grad) for t in tensors if t.dtype in LOW]
    devices = {t.device.type for t in tensors} | {"cpu"}
    try:
        for tensor, data, _ in low:
            tensor.grad = None
            tensor.data = data.float()
        with _RaisePrecision(torch.float32, devices):
            yield
    finally:
        for tensor, data, gradient in low:
            tensor.grad = None
            tensor.data = data
            tensor.grad = gradient


class ModuleCalls:
    """Keeps the arguments of the first calls of a module, and the gradients of their results, as a context manager."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.calls: list[dict[str, Any]] = []

    def __enter__(self) -> ModuleCalls:
        self._handle = self._module.register_forward_hook(self._keep, with_kwargs=True)
        return self

    def __exit__(self, *details: object) -> None:
        self._handle.remove()

    def _keep(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if running_node() is not None or len(self.calls) == _MAX_CALLS:
            return
        call = {"args": raise_floats(args, torch.float64, "cpu"), "kwargs": raise_floats(kwargs, torch.float64, "cpu")}
        call["gradients"] = gradients = {}
        self.calls.append(call)
        for at, tensor in enumerate(nested_tensors(output)):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient, at=at: gradients.update({at: gradient.detach().double().cpu()}))  # type: ignore[no-untyped-call]

    def is_finite_in_float64(self) -> bool:
        """Run the kept calls in float64 on the CPU. Return whether results and gradients are finite, but for -inf."""
        twin = copy.deepcopy(self._module).to("cpu", torch.float64)
        for call in self.calls:
            args, kwargs = map_leaves((call["args"], call["kwargs"]), _as_leaf)
            with _RaisePrecision(torch.float64, {"cpu"}):
                results = list(nested_tensors(twin(*args, **kwargs)))
            roots = [(t, call["gradients"].get(at)) for at, t in enumerate(results) if t.requires_grad]
            usable = [(t, torch.ones_like(t) if g is None or not extremes(g).is_finite else g) for t, g in roots]
            twin.zero_grad()
            backward([t for t, _ in usable], [g for _, g in usable])
            gradients = [t.grad for t in (*nested_tensors((args, kwargs)), *twin.parameters()) if t.grad is not None]
            if not _are_fine(results) or not all(extremes(g).is_finite for g in gradients):
                return False
        return True


def op_is_finite_in_float64(call: tuple[Any, Any, Any]) -> bool:
    """Run one op with the arguments it had, in float64 on the CPU. Return whether its results are finite.

    If an argument holds -inf, as a mask does, the results may hold it too.
    """
    op, args, kwargs = call
    args, kwargs = raise_floats((args, kwargs), torch.float64, "cpu")
    is_strict = all(extremes(t).is_finite for t in nested_tensors((args, kwargs)) if t.is_floating_point())
    args, kwargs = map_leaves((args, kwargs), lambda leaf: torch.float64 if leaf in LOW else leaf)
    with torch.no_grad():
        results = list(nested_tensors(op(*args, **kwargs)))
    return all(extremes(t).is_finite for t in results) if is_strict else _are_fine(results)


def _as_leaf(value: Any) -> Any:
    return value.detach().requires_grad_() if isinstance(value, Tensor) and value.is_floating_point() else value


def _are_fine(tensors: Sequence[Tensor]) -> bool:
    return not any(found.nan or found.plus for found in map(extremes, tensors))
