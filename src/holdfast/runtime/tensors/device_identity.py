"""Names the device of this process, so that a person or a scheduler can find it."""

from __future__ import annotations

import socket

import torch

from holdfast.runtime.tensors.torch_private import cuda_is_initialized


def device_name(index: int | None = None) -> str:
    """Return the UUID of a GPU, by default the current one, as NVML and nvidia-smi have it; "cpu" if CUDA is not in use."""
    if not cuda_is_initialized():
        return "cpu"
    index = torch.cuda.current_device() if index is None else index
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return f"cuda:{index}" if uuid is None else f"GPU-{uuid}"


def describe_device() -> dict[str, str]:
    """Return host and device of this process."""
    return {"host": socket.gethostname(), "device": device_name()}
