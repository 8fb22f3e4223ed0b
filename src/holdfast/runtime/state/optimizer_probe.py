"""What state torch's own optimizers make for a parameter, found by a step on a stand-in without memory."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.runtime.tensors.nested_state import TensorSlot
from holdfast.runtime.tensors.sharded import local

_FAST_PATHS = ("foreach", "fused", "capturable", "differentiable")
"""options that need real memory or a device, and do not change what is in the state"""


def is_torch_optimizer(optimizer: Optimizer) -> bool:
    """Return whether it is an optimizer of torch itself, whose options and state have known names."""
    return type(optimizer).__module__.startswith("torch.optim.")


def missing_state_nbytes(optimizer: Optimizer) -> dict[torch.device, int]:
    """Return the bytes of state, by device, that the optimizer has not made yet for its parameters.

    That of an optimizer whose state is not known is taken for Adam's: twice the parameters.
    """
    nbytes: dict[torch.device, int] = {}
    known: dict[Any, dict[str, Any] | None] = {}
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if optimizer.state.get(p) or not p.requires_grad:
                continue
            part, key = local(p), (number, p.shape, p.dtype)
            if key not in known:
                known[key] = _made_by_a_step(optimizer, group, p) if is_torch_optimizer(optimizer) else None
            made = known[key]
            shaped = [2.0] if made is None else [_share_of(value, p) for value in made.values()]
            size = part.numel() * part.element_size()
            nbytes[part.device] = nbytes.get(part.device, 0) + int(sum(shaped) * size)
    return {device: size for device, size in nbytes.items() if size}


def _share_of(value: Any, parameter: Tensor) -> float:
    """Return the bytes of a piece of state relative to those of its parameter; 0 for a small one."""
    if not isinstance(value, Tensor) or value.dim() == 0 or not parameter.numel():
        return 0.0
    return value.numel() * value.element_size() / (parameter.numel() * parameter.element_size())


def state_mismatch(
    optimizer: Optimizer, state: dict[Any, Any], groups: list[dict[str, Any]], tensors: Mapping[str, Tensor]
) -> str | None:
    """Return what in a saved state this optimizer cannot have made with these group options; None if it can have.

    Of an optimizer that is not torch's, only the form is checked: a dict of names for each parameter.
    """
    owners = [(n, p) for n, group in enumerate(optimizer.param_groups) for p in group["params"]]
    expected: dict[Any, dict[str, Any] | None] = {}
    for index, entry in state.items():
        if isinstance(index, bool) or not isinstance(index, int | str):
            return f"{index!r:.80} is no parameter"
        if isinstance(index, str):
            if is_torch_optimizer(optimizer):
                return f"{index!r:.80} is no parameter"
            continue
        if not 0 <= index < len(owners):
            return f"there is no parameter {index}"
        if not isinstance(entry, dict) or not all(isinstance(name, str) for name in entry):
            return f"that of parameter {index} is {entry!r:.80}"
        if not is_torch_optimizer(optimizer):
            continue
        group, parameter = owners[index]
        key = group, parameter.shape, parameter.dtype
        if key not in expected:
            options = {name: value for name, value in groups[group].items() if name in optimizer.param_groups[group]}
            expected[key] = _made_by_a_step(optimizer, {**optimizer.param_groups[group], **options}, parameter)
        if (problem := _difference(entry, expected[key], tensors)) is not None:
            return f"parameter {index}: {problem}"
    return None


def _made_by_a_step(optimizer: Optimizer, options: dict[str, Any], parameter: Tensor) -> dict[str, Any] | None:
    """Return the state that one step makes for a parameter of this shape and dtype; None if that is not known."""
    stand_in = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
    stand_in.grad = torch.empty_like(stand_in)
    plain = {k: False if k in _FAST_PATHS else v for k, v in options.items() if k != "params"}
    plain = {k: 0.1 if isinstance(v, Tensor | TensorSlot) else v for k, v in plain.items()}
    try:
        optimizer_class: Any = type(optimizer)
        made = optimizer_class([{"params": [stand_in], **plain}])
    except Exception:  # options of another version
        return None
    with contextlib.suppress(Exception), torch.no_grad():  # a value is needed: the state is made before that
        inspect.unwrap(type(made).step)(made)  # without the hooks of the program, which count steps
    return dict(made.state.get(stand_in) or {}) or None


def _difference(entry: dict[str, Any], expected: dict[str, Any] | None, tensors: Mapping[str, Tensor]) -> str | None:
    if expected is None:
        return None
    if missing := sorted(expected.keys() - entry.keys()):
        return f"{missing[0]!r} is missing"
    for name, made in expected.items():
        saved = entry[name]
        if isinstance(made, Tensor) != isinstance(saved, TensorSlot) and saved is not None and made is not None:
            return f"{name!r} is {saved!r:.80}"
        if not (isinstance(made, Tensor) and isinstance(saved, TensorSlot)):
            continue
        value = tensors[saved.name]
        if value.numel() != made.numel() or (made.dim() and tuple(value.shape) != tuple(made.shape)):
            return f"{name!r} has the shape {tuple(value.shape)} instead of {tuple(made.shape)}"
        if value.dtype.is_floating_point != made.dtype.is_floating_point or value.is_complex() != made.is_complex():
            return f"{name!r} is {value.dtype} instead of {made.dtype}"
    return None
