"""How large an update is against what the optimizer's second moment foresees: Adam's update, in units of the LR.

The root mean square of g / sqrt(v) over a sample of elements, always the same ones, computed where they are: a handful
of small kernels, nothing waited for, nothing drawn, nothing changed. v is the moment before the update, corrected for its
bias as the optimizer does it. Optimizers without such a moment have no update size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from holdfast.runtime.optimizers import Optimizers

_TENSORS, _ELEMENTS = 8, 4096
_EPS = 1e-8
_MOMENTS = ("max_exp_avg_sq", "exp_avg_sq", "square_avg")
"""what an optimizer calls its second moment; the first is the one AMSGrad divides by"""


class _Sample(NamedTuple):
    """Some elements of one parameter."""

    parameter: Tensor
    group: dict[str, Any]
    elements: int
    stride: int


class UpdateSize:
    """`sense` once a step, with the gradients unscaled and not yet clipped."""

    def __init__(self, optimizers: Optimizers) -> None:
        self._optimizers = optimizers
        self._chosen: dict[int, list[_Sample]] = {}
        """by the optimizer's place; empty for one that has state but no second moment"""

    def forget(self) -> None:
        """Param groups have changed: choose again."""
        self._chosen.clear()

    @torch.no_grad()
    def sense(self, home: torch.device) -> Tensor | None:
        """The update size of the optimizer where it is largest, on `home`; None while no second moment is known."""
        worst: Tensor | None = None
        for n, optimizer in enumerate(self._optimizers.all):
            if not optimizer.state:
                continue
            if n not in self._chosen:
                self._chosen[n] = _choose(optimizer, max(1, _TENSORS // len(self._optimizers.all)))
            size = _of(optimizer, self._chosen[n], home) if self._chosen[n] else None
            if size is not None:
                worst = size if worst is None else torch.maximum(worst, size)
        return worst


def _choose(optimizer: Optimizer, most: int) -> list[_Sample]:
    """The largest parameters that have a second moment, and every so-manieth element of each."""
    owned = [
        (p, group)
        for group in optimizer.param_groups
        for p in group["params"]
        if p.is_floating_point() and _moment(optimizer, p) is not None
    ]
    owned.sort(key=lambda pair: -pair[0].numel())
    found = []
    for p, group in owned[:most]:
        stride = -(-p.numel() // _ELEMENTS)
        if p.numel():
            found.append(_Sample(p, group, -(-p.numel() // stride), stride))
    return found


def _moment(optimizer: Optimizer, p: Tensor) -> Tensor | None:
    state = optimizer.state.get(p)  # never state[p], which would make one
    if not state:
        return None
    found = next((state[name] for name in _MOMENTS if isinstance(state.get(name), Tensor)), None)
    return found if found is not None and found.shape == p.shape else None


def _of(optimizer: Optimizer, samples: Sequence[_Sample], home: torch.device) -> Tensor | None:
    by_group: dict[tuple[int, torch.device], list[tuple[Tensor, Tensor, Any]]] = {}
    for p, group, elements, stride in samples:
        g, v = p.grad, _moment(optimizer, p)
        # Elements are matched by their place in memory, so both must lie in it alike.
        if g is None or v is None or type(g) is not Tensor or g.layout is not torch.strided or type(v) is not Tensor:
            continue
        if g.stride() != v.stride() or g.device != v.device or not _dense(g):
            continue
        sampled = (
            g.as_strided((elements,), (stride,), g.storage_offset()),
            v.as_strided((elements,), (stride,), v.storage_offset()),
            optimizer.state[p].get("step"),
        )
        by_group.setdefault((id(group), g.device), []).append(sampled)
    options = {id(s.group): s.group for s in samples}
    squares: Tensor | None = None
    count = 0
    for (key, _), sampled_here in by_group.items():
        own = _squares(sampled_here, options[key]).to(home)
        squares = own if squares is None else squares + own
        count += sum(g.numel() for g, _, _ in sampled_here)
    return None if squares is None else (squares / count).sqrt()


def _dense(g: Tensor) -> bool:
    """Whether its elements fill the first `numel` places of its memory."""
    return g.is_contiguous() or sum((n - 1) * s for n, s in zip(g.shape, g.stride(), strict=True)) == g.numel() - 1


def _squares(sampled: Sequence[tuple[Tensor, Tensor, Any]], group: dict[str, Any]) -> Tensor:
    """The sum of g^2 / max(v, eps^2) over elements of one group on one device."""
    eps = float(group.get("eps") or _EPS)
    moments, share = _corrected([v for _, v, _ in sampled], [step for _, _, step in sampled], group)
    g = torch.cat([g for g, _, _ in sampled]).float()  # a copy, so that all from here on may be done in place
    v = torch.cat(moments).float()
    if share != 1.0:
        v.div_(share)
    return g.square_().div_(v.clamp_(min=eps * eps)).sum()


def _corrected(moments: list[Tensor], steps: list[Any], group: dict[str, Any]) -> tuple[list[Tensor], float]:
    """Divided by 1 - beta2^step, where the optimizer does so; or that, where it is one number for all of them.

    A step count on the device stays there.
    """
    betas = group.get("betas")
    if betas is None or any(step is None for step in steps):
        return moments, 1.0
    beta = betas[1]
    if any(isinstance(s, Tensor) and s.device.type != "cpu" for s in (beta, *steps)):
        known = 1.0 - beta ** torch.stack([torch.as_tensor(s, device=moments[0].device) for s in steps])
        return [v.float() / share for v, share in zip(moments, known.unbind(), strict=True)], 1.0
    shares = [1.0 - float(beta) ** float(step) for step in steps]
    if len(set(shares)) == 1:
        return moments, shares[0] or 1.0
    return [v.float() / (share or 1.0) for v, share in zip(moments, shares, strict=True)], 1.0
