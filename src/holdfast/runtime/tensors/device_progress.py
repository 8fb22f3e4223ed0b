"""Finds out from another thread whether the device gets on with the work that the training thread has queued."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from holdfast.runtime.tensors.torch_private import cuda_is_initialized

_SECONDS, _ANSWER_SECONDS = 0.6, 0.8
"""how long the device has to reach a marker behind its queued work, and how long the driver has to answer"""
_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_DISABLE_TIMING = 2


def watch_device() -> Callable[[], bool | None] | None:
    """Return a function that tells whether the device is stuck; None if this process does not train on CUDA.

    Call it on the training thread: its current stream is the one that is watched. The function may be called on any
    thread. It returns None if the driver cannot be asked.
    """
    if torch.version.cuda is None or not cuda_is_initialized():
        return None
    device, stream = torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream

    def is_stuck() -> bool | None:
        # The driver blocks a caller while the queue of launches is full, so a thread of its own asks it.
        found: list[bool | None] = []
        thread = threading.Thread(target=lambda: found.append(_is_stuck(device, stream)), daemon=True)
        thread.start()
        thread.join(_ANSWER_SECONDS)
        return found[0] if found else True

    return is_stuck


def _is_stuck(device: int, stream: int) -> bool | None:
    """Return whether work is queued and a marker behind it is not reached. A host that only queues more is not stuck."""
    try:
        driver: Any = ctypes.CDLL("libcuda.so.1")  # its calls release the GIL, those of torch may hold it
    except OSError:
        return None
    context, event, handle = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p(stream)
    if driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) or driver.cuCtxSetCurrent(context):
        return None
    try:
        status = driver.cuStreamQuery(handle)
        if status != _NOT_READY:
            return None if status else False
        if driver.cuEventCreate(ctypes.byref(event), _DISABLE_TIMING) or driver.cuEventRecord(event, handle):
            return None
        ends = time.monotonic() + _SECONDS
        while (status := driver.cuEventQuery(event)) == _NOT_READY and time.monotonic() < ends:
            time.sleep(0.02)
        driver.cuEventDestroy_v2(event)
        return None if status not in (0, _NOT_READY) else status == _NOT_READY
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(device)
