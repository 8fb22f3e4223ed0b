"""Gradient norms and clipping in one process. `distributed.norms` does it for sharded gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from holdfast.runtime.tensors.sharded import local
from holdfast.runtime.tensors.torch_private import foreach_copy_, foreach_mul_, foreach_norm


class Norm(NamedTuple):
    """Holds the norm of all gradients or weights, or this rank's share of it."""

    value: Tensor
    is_total: bool = True
    """if False, `value` is this rank's share of the squared norm; the shares of all ranks add up to it"""


class ClipSpec(NamedTuple):
    """Holds what gradients are clipped by."""

    max_norm: float
    local_norm: Tensor
    """the result of `gradient_norm` on this rank"""
    agreed_norm: Tensor
    """the norm that all ranks agreed on"""
    known_factor: Tensor | None = None
    """the clip factor of `local_norm`, if it is already computed"""

    def factor(self) -> Tensor:
        return clip_factor(self.max_norm, self.local_norm) if self.known_factor is None else self.known_factor


class GradientNorms(Protocol):
    """Measures gradients before they are clipped, and clips them."""

    def gradient_norm(self, parameters: Sequence[Tensor], *, to_clip: bool) -> Norm:
        """Return the norm. If it is to clip by, it is bit for bit that of `clip_grad_norm_`."""
        ...

    def weight_norm(self, parameters: Sequence[Tensor], device: torch.device) -> Norm | None:
        """Return the norm of the parameters themselves on `device`; None without parameters."""
        ...

    def clip(self, parameters: Sequence[Tensor], by: ClipSpec) -> None:
        """Do the second half of `clip_grad_norm_`. Call it without gradient tracking, after `gradient_norm`."""
        ...


class LocalNorms:
    """Measures and clips gradients that are all whole on this rank.

    If all are dense, of one dtype and on one device, it calls torch's kernels as torch does, without torch's grouping of the
    tensors. For 150 gradients on a slow host that takes 0.6 ms instead of 1.0.
    """

    def __init__(self) -> None:
        self._any_sparse = False
        self._uniform = False
        """whether the gradients measured last were all dense, of one dtype and on one device"""
        self._last: Sequence[Tensor] = ()
        self._one_device = False
        """whether the parameters in `_last` are on one device"""
        self._stacked_norms = torch.empty(0)
        self._cells: tuple[Tensor, ...] = ()

    def gradient_norm(self, parameters: Sequence[Tensor], *, to_clip: bool) -> Norm:
        with torch.set_grad_enabled(False):  # entering `no_grad` takes three times as long
            gradients = _gradients(parameters)
            if parameters is not self._last:  # a gradient is on its parameter's device
                self._last, self._one_device = parameters, len({p.device for p in parameters}) == 1
            self._any_sparse = True in {g.is_sparse for g in gradients}
            one_dtype = len({g.dtype for g in gradients}) == 1 and set(map(type, gradients)) == {Tensor}
            self._uniform = self._one_device and one_dtype and not self._any_sparse
            if self._uniform:
                norms = self._stack(tuple(foreach_norm(gradients, 2.0)))
                return Norm(torch.linalg.vector_norm(norms, 2.0))
            if self._any_sparse:
                gradients = [g.coalesce().values() if g.is_sparse else g for g in gradients]
            return Norm(get_total_norm(gradients))

    def weight_norm(self, parameters: Sequence[Tensor], device: torch.device) -> Norm | None:
        return Norm(get_total_norm(parameters).to(device)) if parameters else None

    def clip(self, parameters: Sequence[Tensor], by: ClipSpec) -> None:
        if self._uniform:
            foreach_mul_(_gradients(parameters), by.factor())
        elif self._any_sparse:
            factor = by.factor()
            for g in _gradients(parameters):
                g.mul_(factor.to(g.device))
        else:
            clip_grads_with_norm_(parameters, by.max_norm, by.local_norm)

    def _stack(self, norms: tuple[Tensor, ...]) -> Tensor:
        """Do what `torch.stack` does; on a GPU in one launch, into memory that is reused at every step."""
        first, row = norms[0], self._stacked_norms
        if not first.is_cuda:
            return torch.stack(norms)
        if len(self._cells) != len(norms) or row.dtype is not first.dtype or row.device != first.device:
            self._stacked_norms = row = torch.empty(len(norms), dtype=first.dtype, device=first.device)
            self._cells = tuple(row.unbind())
        foreach_copy_(self._cells, norms)
        return row


def _gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [g for p in parameters if (g := p.grad) is not None]


@torch.no_grad()
def scale_gradients(parameters: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiply every gradient by `factor`; of a sharded one, this rank's part."""
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    if gradients:
        foreach_mul_(gradients, factor)


def clip_factor(max_norm: float, norm: Tensor) -> Tensor:
    """Return what `clip_grad_norm_` multiplies gradients by."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
