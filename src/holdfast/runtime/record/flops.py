"""Count the FLOPs of a model, and find the peak of its device: what MFU needs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import backward  # by name: Guard.wrap counts what the loop calls as torch.autograd.backward
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from holdfast.core.record.device_peaks import find_peak
from holdfast.runtime.state.wrappers import layers
from holdfast.runtime.tensors.torch_private import TorchDispatchMode

log = logging.getLogger("holdfast")

_RECORDED = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def count_flops(model: nn.Module, *inputs: Any, training: bool = True, **named_inputs: Any) -> int | None:
    """Return the FLOPs of one forward, and of its backward if `training`, as torch counts them; None if it cannot.

    The model runs on the meta device: nothing is computed, and neither its state nor any random generator changes. Torch
    counts matrix products, convolutions and attention; what activation checkpointing computes again is left out. None if
    the forward reads values, calls kernels that torch does not know, or returns nothing to begin a backward from: the
    reason is logged.
    """
    model = layers(model)[-1]  # inside torch.compile and DistributedDataParallel
    tensors = {name: _to_meta(p).requires_grad_(p.requires_grad and training) for name, p in model.named_parameters()}
    tensors |= {name: _to_meta(buffer) for name, buffer in model.named_buffers()}
    given, named = _to_meta(inputs), _to_meta(named_inputs)
    counter = FlopCounterMode(display=False)
    recomputed = _Recomputed(counter)
    try:
        with counter, recomputed, torch.set_grad_enabled(training):
            step = _Step(model, recomputed, training and any(p.requires_grad for p in tensors.values()))
            functional_call(step, {f"model.{name}": tensor for name, tensor in tensors.items()}, given, named)
    except Exception as error:  # anything that a model may do with its inputs
        reason = str(error).partition("\n")[0]
        log.warning("holdfast: the FLOPs of %s cannot be counted: %s", type(model).__name__, reason)
        return None
    return int(counter.get_total_flops()) - recomputed.flops


class _Step(nn.Module):
    """Runs forward and backward as one forward: activation checkpointing needs the parameters in the backward again."""

    def __init__(self, model: nn.Module, recomputed: _Recomputed, has_backward: bool) -> None:
        super().__init__()
        self.model, self._recomputed, self._has_backward = model, recomputed, has_backward

    def forward(self, *given: Any, **named: Any) -> None:
        output = self.model(*given, **named)
        if not self._has_backward:
            return
        floats = [each for each in _tensors(output) if each.requires_grad]
        if not floats:
            raise ValueError(f"no tensor that a backward can begin from in its output, a {type(output).__name__}")
        self._recomputed.is_backward = True
        backward([each.sum() for each in floats])


class _Recomputed(TorchDispatchMode):  # type: ignore[misc]
    """Counts what activation checkpointing computes again in the backward: no part of the model, and so not of MFU.

    A backward itself runs without gradients.
    """

    def __init__(self, counter: FlopCounterMode) -> None:
        super().__init__()
        self._counter, self.is_backward, self.flops = counter, False, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self._counter.get_total_flops() if self.is_backward and torch.is_grad_enabled() else None
        output = func(*args, **(kwargs or {}))
        if before is not None:
            self.flops += int(self._counter.get_total_flops() - before)
        return output


def _to_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_like(value, device="meta")
    if isinstance(value, dict):
        return {key: _to_meta(each) for key, each in value.items()}
    return type(value)(map(_to_meta, value)) if type(value) in (list, tuple) else value


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors of an output: those in lists, tuples, dicts, and the fields of dataclasses."""
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value) and not isinstance(value, dict):
        value = vars(value)
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for each in inside for tensor in _tensors(each)]


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the dense peak FLOP/s of a device for matrix products in `dtype`; None if it is not known."""
    if device.type != "cuda":
        return None
    name = _DTYPES.get(dtype)
    if name is None:
        name = "tf32" if _uses_tf32() else "fp32"
    return find_peak(torch.cuda.get_device_name(device), name, _power_limit(device))


def _uses_tf32() -> bool:
    try:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:  # it was set by its new name, and torch refuses to mix the two
        return getattr(torch.backends.cuda.matmul, "fp32_precision", "") == "tf32"


def peak_of_ranks(
    devices: list[torch.device], dtype: torch.dtype, facts: Mapping[str, Any], ranks: int
) -> float | None:
    """Return the peak of all ranks together, by the recorded precision or else by the dtype of the parameters."""
    dtype = _RECORDED.get(str(facts.get("precision")), dtype)
    peaks = [peak_flops(device, dtype) for device in devices]
    return None if not peaks or None in peaks else ranks * sum(peak for peak in peaks if peak is not None)


def _power_limit(device: torch.device) -> float | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        return float(pynvml.nvmlDeviceGetPowerManagementLimit(pynvml.nvmlDeviceGetHandleByUUID(uuid)) / 1e3)
    except Exception:  # no NVML, or a device that does not say
        return None
