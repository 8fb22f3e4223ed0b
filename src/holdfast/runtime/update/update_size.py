"""Measures how large an update is compared with what the optimizer's second moment predicts.

The update size is the root mean square of g / sqrt(v): Adam's update in units of the LR. g is the gradient and v the second
moment before the update, with the optimizer's bias correction. It is measured on a fixed sample of elements on the device,
in a few small kernels, without waiting. Optimizers without a second moment have no update size. Of sharded tensors, this
rank measures its own part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from holdfast.runtime.state.optimizers import Optimizers
from holdfast.runtime.tensors.sharded import local

_MAX_PARAMETERS = 8
_MAX_RUNS, _RUN_LENGTH = 64, 64
"""runs of neighbouring elements sampled from one parameter, evenly spread, and the elements of a run"""
_DEFAULT_EPS = 1e-8
_SECOND_MOMENTS = ("max_exp_avg_sq", "exp_avg_sq", "square_avg")
"""the names optimizers give their second moment; AMSGrad has the first two, and divides by the first"""


class UpdateSample(NamedTuple):
    """Holds the sampled elements of one parameter at one step."""

    gradient: Tensor
    """this rank's whole gradient; elements are matched by their place in memory"""
    moment: Tensor
    """the sampled elements of the second moment, a view of shape (runs, elements of a run)"""
    step: Any
    group: dict[str, Any]

    @property
    def beta2(self) -> Any:
        """The decay of the second moment, or None if it is not bias-corrected."""
        betas = self.group.get("betas")
        return None if betas is None or self.step is None else betas[1]

    @property
    def floor(self) -> float:
        """The smallest value that the corrected moment is taken to have."""
        eps = self.group.get("eps")
        is_pair = isinstance(eps, tuple | list)  # as in an Adafactor, where neither is Adam's
        return float(_DEFAULT_EPS if is_pair or not eps else eps) ** 2


class UpdateSamples(NamedTuple):
    """Holds one step's samples by optimizer, and for each optimizer by param group and device."""

    by_optimizer: list[list[list[UpdateSample]]]
    counts: list[list[int]]
    """for each optimizer the number of elements in each of its samples"""

    def all(self) -> list[UpdateSample]:
        return [sample for groups in self.by_optimizer for group in groups for sample in group]


class _Choice(NamedTuple):
    """Holds which elements of a parameter are sampled."""

    parameter: Tensor
    group_index: int
    moment_name: str
    shape: tuple[int, int]
    strides: tuple[int, int]

    def sample(self, optimizer: Optimizer) -> UpdateSample | None:
        """Return this step's sample; None if the gradient and the moment are not laid out alike in memory."""
        state, gradient = optimizer.state.get(self.parameter) or {}, self.parameter.grad
        whole = state.get(self.moment_name)
        if gradient is None or whole is None or getattr(gradient, "placements", 0) != getattr(whole, "placements", 0):
            return None
        g = gradient if type(gradient) is Tensor else local(gradient)
        v = whole if type(whole) is Tensor else local(whole)
        plain = type(g) is Tensor and type(v) is Tensor and g.layout is torch.strided and v.layout is torch.strided
        if not plain or g.device != v.device or g.shape != v.shape or g.stride() != v.stride() or not _is_dense(v):
            return None
        view = v.as_strided(self.shape, self.strides, v.storage_offset())
        return UpdateSample(g, view, state.get("step"), optimizer.param_groups[self.group_index])


class UpdateSize:
    """Samples the update once a step: call `sample`, or `sum_of_squares` on several ranks, after gradients are unscaled and
    before they are clipped."""

    def __init__(self, optimizers: Optimizers) -> None:
        self._optimizers = optimizers
        self._choices: dict[int, tuple[object, list[_Choice]]] = {}
        """by the optimizer's index, with the size of its state and groups when they were chosen: a parameter that gets its
        moment later is then chosen too, so that the choice depends on the state alone"""

    def reset(self) -> None:
        """Choose again at the next step, because param groups have changed."""
        self._choices.clear()

    def sample(self) -> UpdateSamples | None:
        """Return this step's samples; None while no optimizer has a second moment."""
        samples = [groups for n, o in enumerate(self._optimizers.all) if (groups := self._sample(n, o))]
        counts = [[sample.moment.numel() for group in groups for sample in group] for groups in samples]
        return UpdateSamples(samples, counts) if samples else None

    @torch.no_grad()
    def sum_of_squares(self, device: torch.device) -> tuple[Tensor, float] | None:
        """Return the sum of g^2 / v on `device`, and of how many elements, for the first optimizer with a second moment.

        The update size over several ranks is the root of one total divided by the other. A rank that holds no sampled
        element returns zeros. None on every rank while no optimizer has a second moment.
        """
        for n, optimizer in enumerate(self._optimizers.all):
            if any(_moment_name(optimizer, p) is not None for p in optimizer.state if isinstance(p, Tensor)):
                total, count = torch.zeros((), device=device), 0
                for group in self._sample(n, optimizer):
                    total = total + _sums(group).sum().to(device)
                    count += sum(sample.moment.numel() for sample in group)
                return total, float(count)
        return None

    def _sample(self, n: int, optimizer: Optimizer) -> list[list[UpdateSample]]:
        if not optimizer.state:
            return []
        size = len(optimizer.state), [len(group["params"]) for group in optimizer.param_groups]
        if n not in self._choices or self._choices[n][0] != size:
            self._choices[n] = size, _choose(optimizer, max(1, _MAX_PARAMETERS // len(self._optimizers.all)))
        grouped: dict[tuple[int, torch.device], list[UpdateSample]] = {}
        for choice in self._choices[n][1]:
            if (sample := choice.sample(optimizer)) is not None:
                grouped.setdefault((choice.group_index, sample.moment.device), []).append(sample)
        return list(grouped.values())


def sums_of_squares(samples: UpdateSamples) -> list[Tensor]:
    """Return for each optimizer, param group and device a row with the sum of g^2 / v of each sample."""
    return [_sums(group) for groups in samples.by_optimizer for group in groups]


def _choose(optimizer: Optimizer, count: int) -> list[_Choice]:
    """Choose the largest parameters that have a second moment, and evenly spread elements of each."""
    candidates = [
        (local(p).numel(), p, n, name)
        for n, group in enumerate(optimizer.param_groups)
        for p in group["params"]
        if p.is_floating_point() and (name := _moment_name(optimizer, p)) is not None
    ]
    candidates.sort(key=lambda candidate: -candidate[0])
    length = min(_RUN_LENGTH, candidates[0][0]) if candidates else 0
    choices = []
    for numel, p, n, name in candidates[:count]:
        if 0 < length <= numel:
            runs = min(_MAX_RUNS, numel // length)
            choices.append(_Choice(p, n, name, (runs, length), (numel // runs, 1)))
    return choices


def _moment_name(optimizer: Optimizer, p: Tensor) -> str | None:
    """Return the name of the parameter's second moment, or None if it has none."""
    state = optimizer.state.get(p)  # never state[p], which would create an entry
    if not state:
        return None
    name = next((name for name in _SECOND_MOMENTS if isinstance(state.get(name), Tensor)), None)
    return name if name is not None and state[name].shape == p.shape else None


def _is_dense(t: Tensor) -> bool:
    """Return whether the elements fill the first `numel` places of the tensor's memory."""
    return t.is_contiguous() or sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) == t.numel() - 1


def _sums(samples: Sequence[UpdateSample]) -> Tensor:
    """Return the sum of g^2 / max(v', eps^2) of each sample, with v' = v / (1 - beta2^step)."""
    both = [s.gradient.as_strided(s.moment.shape, s.moment.stride(), s.gradient.storage_offset()) for s in samples]
    both += [s.moment for s in samples]
    rows = [len(s.moment) for s in samples]
    g, v = torch.cat(both).float().split(sum(rows))  # type: ignore[no-untyped-call]  # copies, so all else is in place
    beta2, steps = samples[0].beta2, [s.step for s in samples]
    if beta2 is not None and None not in steps:
        if all(not isinstance(s, Tensor) or s.device.type == "cpu" for s in (beta2, *steps)):
            corrections = [1.0 - float(beta2) ** float(step) or 1.0 for step in steps]
            if len(set(corrections)) == 1:
                v.div_(corrections[0])
            else:
                by_row = torch.tensor(corrections).repeat_interleave(torch.tensor(rows)).unsqueeze(1)
                v.div_(by_row.to(v.device, non_blocking=True))
        else:  # a group's parameters have the same count, unless one went without a gradient; use the first
            v.div_(1.0 - torch.pow(beta2, torch.as_tensor(steps[0], device=v.device).float()))
    ratios: Tensor = g.square_().div_(v.clamp_(min=samples[0].floor))
    if len(set(rows)) == 1:
        return ratios.view(len(rows), -1).sum(1)
    return torch.stack([part.sum() for part in torch.split(ratios, rows)])
