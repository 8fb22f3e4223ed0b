"""What a traceback keeps alive is freed, and the variables of the loop keep their values."""

from __future__ import annotations

import gc
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from holdfast.runtime.tensors.free_frames import free_pinned


class Output(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor


def weak(tensor: torch.Tensor) -> Any:
    return StorageWeakRef(tensor.untyped_storage())


@pytest.mark.parametrize("kind", ["plain", "view", "tuple", "dict", "module"])
def test_graph_behind_a_variable_of_a_running_frame_is_freed(kind):
    layer, seen = nn.Linear(4, 4), []
    outer = nn.Sequential(layer)

    def failing(x):
        hidden = layer(x).exp()
        seen.append(weak(hidden))
        return hidden * hidden  # its backward needs `hidden`

    out = failing(torch.ones(3, 4))
    expected = out.detach().clone()
    kept: Any = out
    if kind == "view":
        kept = out.view(-1)
    elif kind == "tuple":
        kept = Output(out.sum(), out)
    elif kind == "dict":
        kept = {"logits": [out]}
    elif kind == "module":
        outer.last, kept = out, None
    del out
    try:
        raise torch.OutOfMemoryError("out of memory")
    except torch.OutOfMemoryError as error:
        assert not seen[0].expired()
        free_pinned(error, [outer])
    gc.collect()
    assert seen[0].expired()
    if kind == "view":
        assert kept.grad_fn is None and torch.equal(kept.view(3, 4), expected)
    elif kind == "tuple":
        assert torch.equal(kept.logits, expected)


def test_locals_of_frames_that_have_ended_are_freed():
    seen = []

    def inner():
        big = torch.ones(1000)
        seen.append(weak(big))
        raise torch.OutOfMemoryError("out of memory")

    def outer():
        try:
            inner()
        except torch.OutOfMemoryError as error:
            raise RuntimeError("wrapped") from error

    try:
        outer()
    except RuntimeError as error:
        assert not seen[0].expired()
        free_pinned(error)
        assert seen[0].expired()


def test_leaves_and_parameters_stay_as_they_are():
    layer = nn.Linear(2, 2)
    weight = layer.weight
    loss = layer(torch.ones(1, 2)).sum()
    try:
        raise torch.OutOfMemoryError("out of memory")
    except torch.OutOfMemoryError as error:
        free_pinned(error, [layer])
    assert weight.requires_grad and weight is layer.weight and float(loss) == float(loss)
