"""Norms and clipping where gradients are spread over meshes of ranks.

Clipped gradients are measured exactly as `clip_grad_norm_` measures them, collectives and all; on several meshes, where
that refuses, mesh by mesh. What is measured only to be looked at is left as a share, for the agreement to add up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from holdfast.distributed.checkpoint.shards import is_dtensor
from holdfast.runtime.tensors.norms import ClipSpec, LocalNorms, Norm, clip_factor
from holdfast.runtime.tensors.sharded import local


class MeshNorms:
    """Parameters may be plain, the same on all `size` ranks, or DTensors on one mesh or several."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._local = LocalNorms()

    @torch.no_grad()
    def gradient_norm(self, parameters: Sequence[Tensor], *, to_clip: bool) -> Norm:
        """A share where nothing is to be clipped and something is sharded. Every rank comes to the same kind, since that
        goes by what the parameters are; and calls no collective for it, unless gradients are still partial."""
        if not any(is_dtensor(p) for p in parameters):
            return self._local.gradient_norm(parameters, to_clip=to_clip)
        gradients = [_dense(p.grad) for p in parameters if p.grad is not None]
        if to_clip:
            return Norm(_whole(gradients))
        return Norm(self._share([_summed(g) for g in gradients]), is_total=False)

    @torch.no_grad()
    def weight_norm(self, parameters: Sequence[Tensor], home: torch.device) -> Norm | None:
        if not any(is_dtensor(p) for p in parameters):
            return self._local.weight_norm(parameters, home)
        return Norm(self._share(parameters).to(home), is_total=False)

    @torch.no_grad()
    def clip(self, parameters: Sequence[Tensor], by: ClipSpec) -> None:
        """By its own norm on one mesh, as torch does it. On several, ranks may have come to norms that differ in the last
        bit, and clipping by those would part what is replicated: by the one that they agreed on."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not any(is_dtensor(g) for g in gradients):
            self._local.clip(parameters, by)
            return
        one_mesh = len(_by_mesh(gradients)) == 1
        factor = by.factor() if one_mesh else clip_factor(by.max_norm, by.agreed_norm.to(by.local_norm.dtype))
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for g in gradients:
            if g.is_sparse:
                g.mul_(factor.to(g.device))
            else:
                alike.setdefault((g.device, g.dtype), []).append(local(g))
        for (device, _), parts in alike.items():
            torch._foreach_mul_(parts, factor.to(device))

    def _share(self, tensors: Sequence[Tensor]) -> Tensor:
        """What this rank adds to the squared norm: of what several ranks hold, each adds its fraction."""
        if not tensors:
            return torch.zeros((), dtype=torch.float64)
        alike: dict[tuple[torch.device, torch.dtype, int], list[Tensor]] = {}
        for value in tensors:
            alike.setdefault((value.device, value.dtype, self._holders(value)), []).append(local(value))
        home = tensors[0].device
        total = torch.zeros((), dtype=torch.float64, device=home)
        for (_, dtype, holders), parts in alike.items():
            # Sixteen bits would round away more than the detectors look for.
            norms = torch._foreach_norm(parts, 2, torch.float32 if dtype.itemsize < 4 else None)
            total += torch.stack(norms).double().square().sum().to(home) / holders
        return total

    def _holders(self, value: Any) -> int:
        """How many ranks hold what this one holds of a tensor."""
        if not is_dtensor(value):
            return self._size
        mesh = value.device_mesh
        copies = [mesh.size(d) for d, placement in enumerate(value.placements) if placement.is_replicate()]
        return math.prod(copies) * self._size // int(mesh.size())


def _whole(gradients: Sequence[Tensor]) -> Tensor:
    """The norm over all meshes: the norm of each one's own."""
    norms = [_full(get_total_norm(group)) for group in _by_mesh(gradients).values()]
    if len(norms) < 2:
        return norms[0] if norms else torch.tensor(0.0)
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    return total


def _by_mesh(tensors: Sequence[Tensor]) -> dict[Any, list[Tensor]]:
    """In the order they are given, so that every rank calls the same collectives in the same order. Plain: None."""
    found: dict[Any, list[Tensor]] = {}
    for value in tensors:
        found.setdefault(value.device_mesh if is_dtensor(value) else None, []).append(value)
    return found


def _full(norm: Tensor) -> Tensor:
    return norm.full_tensor() if is_dtensor(norm) else norm


def _dense(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _summed(gradient: Tensor) -> Tensor:
    """Sequence parallelism leaves gradients of which every rank holds a summand: nobody knows their norm alone."""
    if not is_dtensor(gradient) or not any(placement.is_partial() for placement in gradient.placements):
        return gradient
    from torch.distributed.tensor import Replicate

    return gradient.redistribute(placements=[Replicate() if p.is_partial() else p for p in gradient.placements])
