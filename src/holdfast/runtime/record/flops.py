"""Count the FLOPs of a model, and find the peak of its device: what MFU needs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import backward  # by name: Guard.wrap counts what the loop calls as torch.autograd.backward
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from holdfast.core.record.device_peaks import find_peak
from holdfast.runtime.state.wrappers import layers

log = logging.getLogger("holdfast")

_RECORDED = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def count_flops(model: nn.Module, *inputs: Any, training: bool = True, **named_inputs: Any) -> int | None:
    """Return the FLOPs of one forward, and of its backward if `training`, as torch counts them; None if it cannot.

    The model runs on the meta device: nothing is computed, and neither its state nor any random generator changes. Torch
    counts matrix products, convolutions and attention. None if the forward reads values, or calls kernels that torch does
    not know: the reason is logged.
    """
    model = layers(model)[-1]  # inside torch.compile and DistributedDataParallel
    tensors = {name: _to_meta(p).requires_grad_(p.requires_grad and training) for name, p in model.named_parameters()}
    tensors |= {name: _to_meta(buffer) for name, buffer in model.named_buffers()}
    given, named = _to_meta(inputs), _to_meta(named_inputs)
    counter = FlopCounterMode(display=False)
    try:
        with counter, torch.set_grad_enabled(training):
            output = functional_call(model, tensors, given, named)
            floats = [each for each in _tensors(output) if each.requires_grad]
            if training and floats:
                backward([each.sum() for each in floats])
    except Exception as error:  # anything that a model may do with its inputs
        log.warning("holdfast: the FLOPs of %s cannot be counted: %s", type(model).__name__, error)
        return None
    return int(counter.get_total_flops())


def _to_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_like(value, device="meta")
    if isinstance(value, dict):
        return {key: _to_meta(each) for key, each in value.items()}
    return type(value)(map(_to_meta, value)) if type(value) in (list, tuple) else value


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors of an output: those in lists, tuples, dicts, and objects that are dicts."""
    if isinstance(value, Tensor):
        return [value]
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
