"""Frees the tensors that the traceback of an error keeps alive.

The frames of the failed forward or backward hold activations, and so does the graph behind a loss or an output in the
loop's own variables. The next forward would run beside them and fail again.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.runtime.tensors.torch_private import cuda_is_initialized

_MAX_DEPTH = 3


def free_pinned(error: BaseException, modules: Iterable[nn.Module] = ()) -> None:
    """Clear the frames that have ended. Cut the graphs off variables of running frames, which keep their values."""
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        traceback.clear_frames(link.__traceback__)
        for frame, _ in traceback.walk_tb(link.__traceback__):
            _cut_graphs(frame)
        link = link.__cause__ or link.__context__
    for module in modules:  # a loss or a hidden state that forward has left there
        for part in module.modules():
            for value in _graph_tensors(list(vars(part).values())):
                _detach(value)
    gc.collect()
    if cuda_is_initialized():
        torch.cuda.empty_cache()


def _cut_graphs(frame: FrameType) -> None:
    """Detach the tensors in a running frame's variables. A view cannot be detached in place, so its variable is set."""
    values = frame.f_locals
    views = {}
    for name, value in list(values.items()):
        is_kept = [_detach(tensor) for tensor in _graph_tensors(value)]
        if isinstance(value, Tensor) and not all(is_kept):
            views[name] = value.detach()
    if not views:
        return
    values.update(views)
    if sys.version_info < (3, 13) and values is not frame.f_globals:
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


def _detach(tensor: Tensor) -> bool:
    try:
        tensor.detach_()
    except RuntimeError:  # a view
        return False
    return True


def _graph_tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Yield the tensors with a graph in a variable, also those in containers."""
    if isinstance(value, Tensor):
        if value.grad_fn is not None:
            yield value
        return
    if depth == _MAX_DEPTH or isinstance(value, nn.Module):
        return
    if isinstance(value, list | tuple):
        inner: Iterable[Any] = value
    elif isinstance(value, Mapping):
        inner = list(value.values())
    elif is_dataclass(value) and not isinstance(value, type):
        inner = list(vars(value).values()) if hasattr(value, "__dict__") else ()
    else:
        return
    for each in inner:
        yield from _graph_tensors(each, depth + 1)
