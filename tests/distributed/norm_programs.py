"""Programs that measure and clip sharded gradients."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from sharded_models import backward, bit_identical, build, collective_count, full, local_copy, no_collective
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from holdfast.distributed.norms import MeshNorms
from holdfast.runtime.tensors.norms import ClipSpec, LocalNorms


def gradients(parameters: list[Tensor]) -> list[Tensor]:
    return [local_copy(p.grad) for p in parameters if p.grad is not None]


def total(share: Tensor) -> float:
    summed = share.clone()
    dist.all_reduce(summed)
    return float(summed)


def squared(tensors: list[Tensor]) -> float:
    return sum(float(full(t).double().square().sum()) for t in tensors)


def as_torch_clips(kind: str, rank: int, size: int) -> None:
    norms = MeshNorms(size)
    for max_norm in (0.01, 1e6):
        models = build(kind, size), build(kind, size)
        theirs, ours = (list(m.parameters()) for m in models)
        for model in models:
            backward(model, kind, rank, 1)
        assert bit_identical(gradients(theirs), gradients(ours))
        expected = full(clip_grad_norm_(theirs, max_norm))
        norm = norms.gradient_norm(ours, to_clip=True)
        assert norm.is_total and type(norm.value) is Tensor
        assert norm.value.equal(expected), (kind, float(norm.value), float(expected))
        with no_collective():
            norms.clip(ours, ClipSpec(max_norm, norm.value, norm.value.double() * 7))
        assert bit_identical(gradients(theirs), gradients(ours)), (kind, max_norm)


def shares_add_up(kind: str, rank: int, size: int) -> None:
    model, norms = build(kind, size), MeshNorms(size)
    backward(model, kind, rank, 1)
    parameters = list(model.parameters())
    before = collective_count()
    norm = norms.gradient_norm(parameters, to_clip=False)
    weights = norms.weight_norm(parameters, torch.device("cpu"))
    assert kind.endswith("sequence") or collective_count() == before, kind
    assert not norm.is_total and weights is not None and not weights.is_total
    assert type(norm.value) is Tensor and norm.value.dim() == 0
    assert total(norm.value) == pytest.approx(squared([p.grad for p in parameters if p.grad is not None]), rel=1e-5)
    assert total(weights.value) == pytest.approx(squared(parameters), rel=1e-5)
    for bad in (math.nan, math.inf):
        if rank == size - 1:
            largest = max((p.grad.to_local() for p in parameters if hasattr(p, "to_local")), key=Tensor.numel)
            largest.view(-1)[0] = bad
        assert not math.isfinite(total(norms.gradient_norm(parameters, to_clip=False).value)), (kind, bad)


def mixed_meshes(kind: str, rank: int, size: int) -> None:
    """Replicated gradients stay equal on all ranks, although the ranks' own norms differ."""
    model, norms = build(kind, size), MeshNorms(size)
    backward(model, kind, rank, 1)
    parameters = list(model.parameters())
    with pytest.raises((RuntimeError, ValueError)):
        clip_grad_norm_(parameters, 0.01)
    expected = math.sqrt(squared([p.grad for p in parameters if p.grad is not None]))
    before = [full(p.grad).clone() for p in parameters]
    norm = norms.gradient_norm(parameters, to_clip=True)
    assert norm.is_total and float(norm.value) == pytest.approx(expected, rel=1e-5)
    agreed = norm.value.double()
    dist.broadcast(agreed, 0)
    local_norm = norm.value * (1 + 1e-4 * rank)
    norms.clip(parameters, ClipSpec(0.01, local_norm, agreed))
    factor = float((0.01 / (agreed.float() + 1e-6)).clamp(max=1.0))
    for p, was in zip(parameters, before, strict=True):
        assert full(p.grad).equal(was * factor)


def plain_is_local(rank: int, size: int) -> None:
    model, norms = build("ddp", size), MeshNorms(size)
    backward(model, "ddp", rank, 1)
    parameters = list(model.parameters())
    with no_collective():
        for to_clip in (True, False):
            norm = norms.gradient_norm(parameters, to_clip=to_clip)
            assert norm.is_total and norm.value.equal(LocalNorms().gradient_norm(parameters, to_clip=to_clip).value)
        assert norms.weight_norm([], torch.device("cpu")) is None


def norms_of_two(folder: Path, rank: int, size: int) -> None:
    plain_is_local(rank, size)
    # Older versions of torch take the norm of each rank's summand of a partial gradient.
    summed = [] if torch.__version__ < "2.13" else ["tp+sequence"]
    for kind in ("fsdp", "kept", "tp", *summed):
        as_torch_clips(kind, rank, size)
        shares_add_up(kind, rank, size)
    shares_add_up("tp+norm", rank, size)
    mixed_meshes("tp+norm", rank, size)


def norms_of_four(folder: Path, rank: int, size: int) -> None:
    for kind in ("fsdp", "both"):
        as_torch_clips(kind, rank, size)
        shares_add_up(kind, rank, size)
    shares_add_up("both+norm", rank, size)
    mixed_meshes("both+norm", rank, size)
