"""Computes norms of sharded gradients, and clips them.

Gradients that will be clipped are measured exactly as `clip_grad_norm_` does, including its collectives. It refuses several
meshes; here each mesh is measured and the results are combined. Without clipping, each rank returns its share of the
squared norm, which the per-step agreement sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from holdfast.distributed.dtensor import is_dtensor
from holdfast.runtime.tensors.norms import ClipSpec, LocalNorms, Norm, clip_factor
from holdfast.runtime.tensors.sharded import local
from holdfast.runtime.tensors.torch_private import foreach_mul_, foreach_norm


class MeshNorms:
    """Implements GradientNorms for plain parameters, equal on all `size` ranks, and DTensors on one mesh or several."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._local = LocalNorms()

    @torch.no_grad()
    def gradient_norm(self, parameters: Sequence[Tensor], *, to_clip: bool) -> Norm:
        """Return a share if a parameter is sharded and nothing will be clipped, else the whole norm: the same on every
        rank. A share needs no collective unless gradients are still partial."""
        if not any(is_dtensor(p) for p in parameters):
            return self._local.gradient_norm(parameters, to_clip=to_clip)
        gradients = [p.grad for p in parameters if p.grad is not None]
        gradients = [g.coalesce().values() if g.is_sparse else g for g in gradients]
        if to_clip:
            return Norm(_total_norm(gradients))
        return Norm(self._share([_without_partial(g) for g in gradients]), is_total=False)

    @torch.no_grad()
    def weight_norm(self, parameters: Sequence[Tensor], home: torch.device) -> Norm | None:
        if not any(is_dtensor(p) for p in parameters):
            return self._local.weight_norm(parameters, home)
        return Norm(self._share(parameters).to(home), is_total=False)

    @torch.no_grad()
    def clip(self, parameters: Sequence[Tensor], by: ClipSpec) -> None:
        """Clip by this rank's norm on one mesh, as torch does. On several meshes clip by the agreed norm: the ranks' own
        norms may differ in the last bit, and replicated gradients would diverge."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not any(is_dtensor(g) for g in gradients):
            self._local.clip(parameters, by)
            return
        one_mesh = len(_by_mesh(gradients)) == 1
        factor = by.factor() if one_mesh else clip_factor(by.max_norm, by.agreed_norm.to(by.local_norm.dtype))
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for g in gradients:
            if g.is_sparse:
                g.mul_(factor.to(g.device))
            else:
                groups.setdefault((g.device, g.dtype), []).append(local(g))
        for (device, _), shards in groups.items():
            foreach_mul_(shards, factor.to(device))

    def _share(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return this rank's share of the squared norm. A tensor that n ranks hold counts 1/n on each."""
        if not tensors:
            return torch.zeros((), dtype=torch.float64)
        groups: dict[tuple[torch.device, torch.dtype, int], list[Tensor]] = {}
        for value in tensors:
            groups.setdefault((value.device, value.dtype, self._holders(value)), []).append(local(value))
        device = tensors[0].device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for (_, dtype, holders), shards in groups.items():
            # Rounding to 16 bits would hide changes that the detectors look for.
            norms = foreach_norm(shards, 2, torch.float32 if dtype.itemsize < 4 else None)
            total += torch.stack(norms).double().square().sum().to(device) / holders
        return total

    def _holders(self, value: Any) -> int:
        """Return the number of ranks that hold what this rank holds of a tensor."""
        if not is_dtensor(value):
            return self._size
        mesh = value.device_mesh
        copies = [mesh.size(d) for d, placement in enumerate(value.placements) if placement.is_replicate()]
        return math.prod(copies) * self._size // int(mesh.size())


def _total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm over all meshes: the norm of the norms of each mesh."""
    norms = [get_total_norm(group) for group in _by_mesh(gradients).values()]
    norms = [norm.full_tensor() if is_dtensor(norm) else norm for norm in norms]
    if len(norms) < 2:
        return norms[0] if norms else torch.tensor(0.0)
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    return total


def _by_mesh(tensors: Sequence[Tensor]) -> dict[Any, list[Tensor]]:
    """Group tensors by mesh (None: plain), in the given order, so that every rank calls the collectives in that order."""
    groups: dict[Any, list[Tensor]] = {}
    for value in tensors:
        groups.setdefault(value.device_mesh if is_dtensor(value) else None, []).append(value)
    return groups


def _without_partial(gradient: Tensor) -> Tensor:
    """Sum the gradient over ranks if each holds a summand, as after sequence parallelism; its norm needs the sum."""
    if not is_dtensor(gradient) or not any(placement.is_partial() for placement in gradient.placements):
        return gradient
    from torch.distributed.tensor import Replicate

    return gradient.redistribute(placements=[Replicate() if p.is_partial() else p for p in gradient.placements])
