"""Norms and clipping of one process. Where gradients are sharded, the layer that communicates has its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


class Norm(NamedTuple):
    """The norm of all gradients, or this rank's part in it."""

    value: Tensor
    whole: bool = True
    """False: `value` is this rank's share of the squared norm; the shares of all ranks add up to it"""


class NormAndClip(Protocol):
    """Measures gradients before they are clipped, and clips them by what was measured."""

    def of_gradients(self, parameters: Sequence[Tensor], *, to_clip: bool) -> Norm:
        """Exactly as `clip_grad_norm_` computes it where they are to be clipped by it; else as is cheapest."""
        ...

    def of_weights(self, parameters: Sequence[Tensor], home: torch.device) -> Norm | None:
        """The norm of the parameters themselves, on `home`; None where there are none."""
        ...

    def clip(self, parameters: Sequence[Tensor], max_norm: float, own: Tensor, agreed: Tensor) -> None:
        """The second half of `clip_grad_norm_`. `own` is what `of_gradients` gave, `agreed` what all ranks agreed on."""
        ...


class LocalNorms:
    """Every gradient is here, whole."""

    @torch.no_grad()
    def of_gradients(self, parameters: Sequence[Tensor], *, to_clip: bool) -> Norm:
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not any(g.is_sparse for g in gradients):
            return Norm(get_total_norm(gradients))
        dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
        return Norm(get_total_norm(dense))

    @torch.no_grad()
    def of_weights(self, parameters: Sequence[Tensor], home: torch.device) -> Norm | None:
        return Norm(get_total_norm(parameters).to(home)) if parameters else None

    @torch.no_grad()
    def clip(self, parameters: Sequence[Tensor], max_norm: float, own: Tensor, agreed: Tensor) -> None:
        if any(p.grad is not None and p.grad.is_sparse for p in parameters):
            factor = torch.clamp(max_norm / (own + 1e-6), max=1.0)
            for p in parameters:
                if p.grad is not None:
                    p.grad.mul_(factor.to(p.grad.device))
        else:
            clip_grads_with_norm_(parameters, max_norm, own)
