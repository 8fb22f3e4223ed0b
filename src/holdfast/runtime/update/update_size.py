"""How large an update is against what the optimizer's second moment foresees: Adam's update, in units of the LR.

The root mean square of g / sqrt(v) over a sample of elements, always the same ones, computed where they are: a handful
of small kernels, nothing waited for, nothing drawn, nothing changed. v is the moment before the update, corrected for its
bias as the optimizer does it. Optimizers without such a moment have no update size. Of what is sharded, this rank looks at
its own part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from holdfast.runtime.state.optimizers import Optimizers
from holdfast.runtime.tensors.named_params import same_objects
from holdfast.runtime.tensors.sharded import local

_TENSORS, _RUNS, _WIDTH = 8, 64, 64
"""parameters looked at; runs of neighbouring elements in each, evenly spread, and how long a run is"""
_EPS = 1e-8
_MOMENTS = ("max_exp_avg_sq", "exp_avg_sq", "square_avg")
"""what an optimizer calls its second moment; the first is the one AMSGrad divides by"""


class _Sample:
    """Some elements of one parameter, by their place in memory."""

    __slots__ = (
        *("group", "name", "parameter", "shape", "strides"),
        *("_address", "_elements", "_moment", "_numel", "_spread", "_stride", "device"),
    )

    def __init__(
        self, parameter: Tensor, group: dict[str, Any], name: str, shape: tuple[int, int], strides: tuple[int, int]
    ) -> None:
        self.parameter, self.group, self.name, self.shape, self.strides = parameter, group, name, shape, strides
        self._moment: Tensor | None = None
        self._elements: Tensor | None = None
        self.device: torch.device | None = None
        """where the moment is"""
        self._stride: tuple[int, ...] = ()
        self._spread: Any = None
        self._address = self._numel = 0

    def at(self, state: Mapping[Any, Any]) -> tuple[Seen, Tensor] | None:
        """The elements of the moment as they are now, and the gradient; None where they do not lie in memory alike."""
        g, own = self.parameter.grad, state.get(self.parameter)
        if g is None or not own:
            return None
        v = own.get(self.name)
        if v is not self._moment or (type(v) is Tensor and v.data_ptr() != self._address):
            # Otherwise it lies where it did, as it does from step to step.
            self._moment, part = v, None if v is None else local(v)
            self._address = 0 if type(v) is not Tensor else v.data_ptr()
            self._numel = 0 if part is None else part.numel()
            plain = type(part) is Tensor and part.layout is torch.strided and _dense(part)
            self._elements = self.of(part) if part is not None and plain else None
            self.device = None if part is None else part.device
            self._stride = part.stride() if part is not None and plain else ()
            self._spread = getattr(v, "placements", None)
        spread = None
        if type(g) is not Tensor:
            spread, g = getattr(g, "placements", None), local(g)
        if self._elements is None or spread != self._spread or type(g) is not Tensor:
            return None
        # Elements are matched by their place in memory, so both must lie in it alike.
        if g.layout is not torch.strided or g.stride() != self._stride or g.numel() != self._numel:
            return None
        return (Seen(self, self._elements, own.get("step"), self.group), g) if g.device == self.device else None

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.as_strided(self.shape, self.strides, tensor.storage_offset())


class UpdateSamples(NamedTuple):
    """What is to be measured at one step."""

    groups: list[list[list[Seen]]]
    """by optimizer and group"""
    gradients: list[Tensor]
    """theirs, in the same order"""
    made: object
    """the same for as long as all but the gradients is as it was"""


class UpdateSums(NamedTuple):
    """What was sampled at one step, on its way to the host."""

    parts: list[Tensor]
    """for each optimizer and group a row of sums, one a sample, where the optimizers' state is"""
    elements: list[list[int]]
    """for each optimizer, of how many elements they are"""


def size_of(sums: Sequence[float], elements: Sequence[Sequence[int]]) -> float | None:
    """The update size of the optimizer where it is largest; NaN where one is. None where nothing was sampled."""
    worst, at = None, 0
    for counts in elements:
        total = sum(sums[at : at + len(counts)])
        at += len(counts)
        size = math.sqrt(total / sum(counts)) if total >= 0 else math.nan
        worst = size if worst is None or not size <= worst else worst
    return worst


class UpdateSize:
    """`sample` once a step, or `sum_of_squares` on several ranks, with the gradients unscaled and not yet clipped."""

    def __init__(self, optimizers: Optimizers) -> None:
        self._optimizers = optimizers
        self._chosen: dict[int, list[_Sample]] = {}
        """by the optimizer's place; empty for one that has state but no second moment"""
        self._shapes: dict[int, _Shape] = {}
        """of the optimizers when their parameters were chosen: one that gets its moment later is chosen too, so that the
        choice depends on the state alone and not on when the process began"""
        self._standing: _Standing | None = None
        self._made: tuple[list[Any], list[Any]] = [], []

    def reset(self) -> None:
        """Param groups have changed: choose again."""
        self._chosen.clear()
        self._shapes.clear()
        self._standing, self._made = None, ([], [])

    def sample(self) -> UpdateSamples | None:
        """What is to be measured now; None while no second moment is known."""
        standing = self._standing
        if standing is not None and (gradients := standing.gradients()) is not None:
            return UpdateSamples(standing.groups, gradients, standing.made)
        self._standing = None
        found = [(o, pairs) for n, o in enumerate(self._optimizers.all) if (pairs := self._of(n, o))]
        if not found:
            return None
        groups = [[[seen for seen, _ in group] for group in pairs] for _, pairs in found]
        gradients = [g for _, pairs in found for group in pairs for _, g in group]
        made = _made_of(groups, gradients)
        if not (same_objects(made[0], self._made[0]) and made[1] == self._made[1]):
            self._made = made
        states = [o.state for o, pairs in found for group in pairs for _ in group]
        if len(gradients) == sum(map(len, self._chosen.values())):  # one that is missing now may be there the next time
            self._standing = _Standing.of(groups, gradients, states, self._optimizers.all, self._made)
        return UpdateSamples(groups, gradients, self._made)

    @torch.no_grad()
    def sum_of_squares(self, home: torch.device) -> tuple[Tensor, float] | None:
        """The sum of squares, on `home`, and of how many elements, of the first optimizer that has a second moment: the
        update size over several ranks is the root of the sums of both, divided. A rank that holds nothing of what is
        looked at gives zeros; None while no second moment is known, on any rank."""
        for n, optimizer in enumerate(self._optimizers.all):
            if any(_moment(optimizer, p) is not None for p in optimizer.state if isinstance(p, Tensor)):
                total, count = torch.zeros((), device=home), 0
                for group in self._of(n, optimizer):
                    seen, gradients = [s for s, _ in group], [g for _, g in group]
                    total = total + _sums_of(seen, gradients).sum().to(home)
                    count += sum(s.v.numel() for s in seen)
                return total, float(count)
        return None

    def _of(self, n: int, optimizer: Optimizer) -> list[list[tuple[Seen, Tensor]]]:
        if not optimizer.state:
            return []
        shape = self._shapes.get(n)
        if shape is None or not shape.is_of(optimizer):
            self._shapes[n] = _Shape.of(optimizer)
            self._chosen[n] = _choose(optimizer, max(1, _TENSORS // len(self._optimizers.all)))
        by_group: dict[tuple[int, torch.device | None], list[tuple[Seen, Tensor]]] = {}
        state = optimizer.state
        for sample in self._chosen[n]:
            if (seen := sample.at(state)) is not None:
                by_group.setdefault((id(sample.group), sample.device), []).append(seen)
        return list(by_group.values())


class _Shape(NamedTuple):
    """How many parameters of an optimizer have state, which groups it has, and how many parameters are in each: which
    ones, `reset` is told of."""

    known: int
    groups: list[dict[str, Any]]
    sizes: list[int]

    @staticmethod
    def of(optimizer: Optimizer) -> _Shape:
        groups = optimizer.param_groups
        return _Shape(len(optimizer.state), list(groups), [len(g["params"]) for g in groups])

    def is_of(self, optimizer: Optimizer) -> bool:
        now = optimizer.param_groups
        alike = len(optimizer.state) == self.known and same_objects(now, self.groups)
        return alike and [len(g["params"]) for g in now] == self.sizes


class _Standing:
    """What was seen at a step, for the next ones: as long as it stands, only the gradients are others."""

    def __init__(
        self,
        groups: list[list[list[Seen]]],
        made: object,
        states: list[tuple[Optimizer, Any, _Shape]],
        rows: list[tuple[Any, ...]],
        options: list[tuple[dict[str, Any], Any, Any]],
    ) -> None:
        self.groups, self.made = groups, made
        self._states, self._rows, self._options = states, rows, options

    @staticmethod
    def of(
        groups: list[list[list[Seen]]],
        gradients: Sequence[Tensor],
        states: Sequence[Mapping[Any, Any]],
        optimizers: Sequence[Optimizer],
        made: object,
    ) -> _Standing | None:
        """`states`: one for each that was seen. None where something is sharded, or not of tensors."""
        seen = [s for optimizer in groups for group in optimizer for s in group]
        rows: list[tuple[Any, ...]] = []
        for s, g, state in zip(seen, gradients, states, strict=True):
            p, name, step = s.sample.parameter, s.sample.name, s.step
            shelf = state[p]
            v = shelf.get(name)
            if type(v) is not Tensor or type(p.grad) is not Tensor or type(step) is not Tensor:
                return None
            place = v, v.data_ptr(), step, step.data_ptr()
            rows.append((state, p, shelf, name, *place, g.stride(), g.dtype, g.numel(), g.device))
        options = [(g, g.get("eps"), _decay(g)) for g in {id(s.group): s.group for s in seen}.values()]
        return _Standing(groups, made, [(o, o.state, _Shape.of(o)) for o in optimizers], rows, options)

    def gradients(self) -> list[Tensor] | None:
        """Those of now; None where anything else has changed."""
        for optimizer, state, shape in self._states:
            if optimizer.state is not state or not shape.is_of(optimizer):
                return None
        for group, eps, decay in self._options:
            if group.get("eps") is not eps or _decay(group) is not decay:
                return None
        found = []
        for state, p, shelf, name, v, address, step, place, stride, kind, count, device in self._rows:
            g = p.grad
            if (
                type(g) is not Tensor
                or state.get(p) is not shelf
                or shelf.get(name) is not v
                or v.data_ptr() != address
                or shelf.get("step") is not step
                or step.data_ptr() != place
                or g.layout is not torch.strided
                or g.stride() != stride
                or g.dtype is not kind
                or g.numel() != count
                or g.device != device
            ):
                return None
            found.append(g)
        return found


def _decay(group: Mapping[str, Any]) -> Any:
    betas = group.get("betas")
    return None if betas is None or len(betas) < 2 else betas[1]


def _made_of(groups: Sequence[Sequence[Sequence[Seen]]], gradients: Sequence[Tensor]) -> tuple[list[Any], list[Any]]:
    """All that a table of the samples comes from: the objects, numbers among them, which nobody changes but by putting
    others in their place; and where the tensors lie, which `.data` may have moved."""
    held: list[Any] = [g.dtype for g in gradients]
    places: list[Any] = []
    for optimizer in groups:
        for group in optimizer:
            held += (group[0].group.get("eps"), _decay(group[0].group))
            for _, v, step, _ in group:
                held += (v, step)
                places += (v.data_ptr(), step.data_ptr() if isinstance(step, Tensor) else None)
    return held, places


@torch.no_grad()
def sense(looked: UpdateSamples) -> UpdateSums:
    """Measure what `sample` has found, by torch's own operations."""
    parts, gradients = [], iter(looked.gradients)
    for optimizer in looked.groups:
        for group in optimizer:
            parts.append(_sums_of(group, list(islice(gradients, len(group)))))
    return UpdateSums(parts, elements_of(looked))


def elements_of(looked: UpdateSamples) -> list[list[int]]:
    return [[seen.v.numel() for group in optimizer for seen in group] for optimizer in looked.groups]


def _choose(optimizer: Optimizer, most: int) -> list[_Sample]:
    """The largest parameters that have a second moment, and every so-manieth element of each."""
    owned = [
        (p, group, name, local(p).numel())
        for group in optimizer.param_groups
        for p in group["params"]
        if p.is_floating_point() and (name := _moment(optimizer, p)) is not None
    ]
    owned.sort(key=lambda of: -of[3])
    width = min(_WIDTH, owned[0][3]) if owned else 0
    found = []
    for p, group, name, numel in owned[:most]:
        if 0 < width <= numel:
            runs = min(_RUNS, numel // width)
            found.append(_Sample(p, group, name, (runs, width), (numel // runs, 1)))
    return found


def _moment(optimizer: Optimizer, p: Tensor) -> str | None:
    """What the optimizer calls the parameter's second moment, where it has one."""
    state = optimizer.state.get(p)  # never state[p], which would make one
    if not state:
        return None
    name = next((name for name in _MOMENTS if isinstance(state.get(name), Tensor)), None)
    return name if name is not None and state[name].shape == p.shape else None


class Seen(NamedTuple):
    """One sample at one step."""

    sample: _Sample
    v: Tensor
    """the moment's elements"""
    step: Any
    group: dict[str, Any]

    @property
    def floor(self) -> float:
        """What v is kept above."""
        return float(self.group.get("eps") or _EPS) ** 2


def _dense(g: Tensor) -> bool:
    """Whether its elements fill the first `numel` places of its memory."""
    return g.is_contiguous() or sum((n - 1) * s for n, s in zip(g.shape, g.stride(), strict=True)) == g.numel() - 1


def _sums_of(seen: Sequence[Seen], gradients: Sequence[Tensor]) -> Tensor:
    """The sum of g^2 / max(v', eps^2) for each sample, v' being v / (1 - beta2^step)."""
    group = seen[0].group
    floor = seen[0].floor
    # A copy, so that all from here on may be done in place.
    rows = [len(s.v) for s in seen]
    both = [*[s.sample.of(g) for s, g in zip(seen, gradients, strict=True)], *[s.v for s in seen]]
    g, v = torch.cat(both).float().split(sum(rows))  # type: ignore[no-untyped-call]
    steps, betas = [s.step for s in seen], group.get("betas")
    if betas is None or any(step is None for step in steps):
        return _sums(g, v.clamp_(min=floor), rows)
    beta = betas[1]
    if all(not isinstance(s, Tensor) or s.device.type == "cpu" for s in (beta, *steps)):
        known = [1.0 - float(beta) ** float(step) for step in steps]
        if len(set(known)) == 1:
            v.div_(known[0] or 1.0)
        else:
            shares = torch.tensor([share or 1.0 for share in known]).repeat_interleave(torch.tensor(rows))
            v.div_(shares.unsqueeze(1).to(v.device, non_blocking=True))
        return _sums(g, v.clamp_(min=floor), rows)
    # Parameters of a group are counted alike, but for one that went without a gradient now and then: one stands for all.
    count = torch.as_tensor(steps[0], device=v.device).float()
    return _sums(g, v.div_(1.0 - torch.pow(beta, count)).clamp_(min=floor), rows)


def _sums(g: Tensor, v: Tensor, rows: Sequence[int]) -> Tensor:
    """g^2 / v, added up over each sample's rows; writes over both."""
    ratios = g.square_().div_(v)
    if len(set(rows)) == 1:
        return ratios.view(len(rows), -1).sum(1)
    return torch.stack([part.sum() for part in torch.split(ratios, list(rows))])
