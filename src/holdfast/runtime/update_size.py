"""How large an update is against what the optimizer's second moment foresees: Adam's update, in units of the LR.

The root mean square of g / sqrt(v) over a sample of elements, always the same ones, computed where they are: a handful
of small kernels, nothing waited for, nothing drawn, nothing changed. v is the moment before the update, corrected for its
bias as the optimizer does it. Optimizers without such a moment have no update size. Of what is sharded, this rank looks at
its own part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from holdfast.runtime.optimizers import Optimizers
from holdfast.runtime.sharded import local

_TENSORS, _RUNS, _WIDTH = 8, 64, 64
"""parameters looked at; runs of neighbouring elements in each, evenly spread, and how long a run is"""
_EPS = 1e-8
_MOMENTS = ("max_exp_avg_sq", "exp_avg_sq", "square_avg")
"""what an optimizer calls its second moment; the first is the one AMSGrad divides by"""


class _Sample(NamedTuple):
    """Some elements of one parameter, by their place in memory."""

    parameter: Tensor
    group: dict[str, Any]
    shape: tuple[int, int]
    strides: tuple[int, int]

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.as_strided(self.shape, self.strides, tensor.storage_offset())


class UpdateSize:
    """`sense` once a step, or `shares` where several ranks sense, with the gradients unscaled and not yet clipped."""

    def __init__(self, optimizers: Optimizers) -> None:
        self._optimizers = optimizers
        self._chosen: dict[int, list[_Sample]] = {}
        """by the optimizer's place; empty for one that has state but no second moment"""
        self._states: dict[int, int] = {}
        """how many parameters had state when they were chosen: one that gets its moment later is chosen too, so that
        the choice depends on the state alone and not on when the process began"""

    def forget(self) -> None:
        """Param groups have changed: choose again."""
        self._chosen.clear()
        self._states.clear()

    @torch.no_grad()
    def sense(self, home: torch.device) -> Tensor | None:
        """The update size of the optimizer where it is largest, on `home`; None while no second moment is known."""
        worst: Tensor | None = None
        for n, optimizer in enumerate(self._optimizers.all):
            squares, count = self._of(n, optimizer, home)
            if squares is not None:
                size = (squares / count).sqrt()
                worst = size if worst is None else torch.maximum(worst, size)
        return worst

    @torch.no_grad()
    def shares(self, home: torch.device) -> tuple[Tensor, float] | None:
        """The sum of squares, on `home`, and of how many elements, of the first optimizer that has a second moment: the
        update size over several ranks is the root of the sums of both, divided. A rank that holds nothing of what is
        looked at gives zeros; None while no second moment is known, on any rank."""
        for n, optimizer in enumerate(self._optimizers.all):
            if any(_moment(optimizer, p) is not None for p in optimizer.state if isinstance(p, Tensor)):
                squares, count = self._of(n, optimizer, home)
                return (torch.zeros((), device=home) if squares is None else squares), float(count)
        return None

    def _of(self, n: int, optimizer: Optimizer, home: torch.device) -> tuple[Tensor | None, int]:
        if not optimizer.state:
            return None, 0
        if self._states.get(n) != len(optimizer.state):
            self._states[n] = len(optimizer.state)
            self._chosen[n] = _choose(optimizer, max(1, _TENSORS // len(self._optimizers.all)))
        return _of(optimizer, self._chosen[n], home)


def _choose(optimizer: Optimizer, most: int) -> list[_Sample]:
    """The largest parameters that have a second moment, and every so-manieth element of each."""
    owned = [
        (p, group, local(p).numel())
        for group in optimizer.param_groups
        for p in group["params"]
        if p.is_floating_point() and _moment(optimizer, p) is not None
    ]
    owned.sort(key=lambda of: -of[2])
    width = min(_WIDTH, owned[0][2]) if owned else 0
    found = []
    for p, group, numel in owned[:most]:
        if 0 < width <= numel:
            runs = min(_RUNS, numel // width)
            found.append(_Sample(p, group, (runs, width), (numel // runs, 1)))
    return found


def _moment(optimizer: Optimizer, p: Tensor) -> Tensor | None:
    state = optimizer.state.get(p)  # never state[p], which would make one
    if not state:
        return None
    found = next((state[name] for name in _MOMENTS if isinstance(state.get(name), Tensor)), None)
    return found if found is not None and found.shape == p.shape else None


def _of(optimizer: Optimizer, samples: Sequence[_Sample], home: torch.device) -> tuple[Tensor | None, int]:
    """The sum of squares over the samples, and how many elements they are."""
    by_group: dict[tuple[int, torch.device], list[_Seen]] = {}
    for sample in samples:
        g, v = sample.parameter.grad, _moment(optimizer, sample.parameter)
        if g is None or v is None or getattr(g, "placements", None) != getattr(v, "placements", None):
            continue
        g, v = local(g), local(v)
        if type(g) is not Tensor or g.layout is not torch.strided or type(v) is not Tensor:
            continue
        # Elements are matched by their place in memory, so both must lie in it alike.
        if g.stride() != v.stride() or g.device != v.device or not _dense(g):
            continue
        seen = _Seen(sample.of(g), sample.of(v), optimizer.state[sample.parameter].get("step"), sample.group)
        by_group.setdefault((id(sample.group), g.device), []).append(seen)
    squares: Tensor | None = None
    for seen_here in by_group.values():
        own = _squares(seen_here).to(home)
        squares = own if squares is None else squares + own
    count = sum(s.g.numel() for seen_here in by_group.values() for s in seen_here)
    return squares, count


class _Seen(NamedTuple):
    """The sampled elements at one step."""

    g: Tensor
    v: Tensor
    step: Any
    group: dict[str, Any]


def _dense(g: Tensor) -> bool:
    """Whether its elements fill the first `numel` places of its memory."""
    return g.is_contiguous() or sum((n - 1) * s for n, s in zip(g.shape, g.stride(), strict=True)) == g.numel() - 1


def _squares(seen: Sequence[_Seen]) -> Tensor:
    """The sum of g^2 / max(v, eps^2) over elements of one group on one device."""
    group = seen[0].group
    eps = float(group.get("eps") or _EPS)
    moments, share = _corrected([s.v for s in seen], [s.step for s in seen], group)
    g = torch.cat([s.g for s in seen]).float()  # a copy, so that all from here on may be done in place
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
        known = 1.0 - torch.pow(beta, torch.stack([torch.as_tensor(s, device=moments[0].device) for s in steps]))
        return [v.float() / share for v, share in zip(moments, known.unbind(), strict=True)], 1.0
    shares = [1.0 - float(beta) ** float(step) for step in steps]
    if len(set(shares)) == 1:
        return moments, shares[0] or 1.0
    return [v.float() / (share or 1.0) for v, share in zip(moments, shares, strict=True)], 1.0
