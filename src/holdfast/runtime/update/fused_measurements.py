"""What `sensing` does, in one launch: for a process alone on a GPU, on all but the few steps at which more is looked at.

In a loop that waits for the host, each of the dozen launches that `sensing` takes costs 10 to 30 us. Where Triton is not
there, or a number is not of the kind that the kernel reads, `sensing` itself does it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from holdfast.runtime.tensors.norms import clip_factor
from holdfast.runtime.tensors.triton_kernels import OptionalKernel
from holdfast.runtime.update.measurements import (
    MOST,
    DeviceMeasurements,
    HostMeasurements,
    Known,
    compared_with,
    reading,
)
from holdfast.runtime.update.update_size import Seen, UpdateSamples, elements_of, size_of

_HERE = nullcontext()
_TRIED = (
    *((1.0, 1.0), (1.0, 3.0), (0.3, 1.7), (1.7, 0.3), (0.77, 12345.678), (1.0, 0.0), (5.0, 1e-42), (1e-40, 3.0)),
    *((1.0, math.inf), (math.inf, 3.0), (math.inf, math.inf), (1.0, math.nan)),
)
"""limits to clip by, and norms, to try it out with"""


class FusedMeasurements:
    """The numbers on their way to the host, and what follows from them, where the step ran."""

    def __init__(
        self,
        place: Any,
        answers: Sequence[Tensor],
        limits: Known,
        scaled: bool,
        elements: list[list[int]],
        spare: list[Any],
    ):
        self.veto, self.lands, self.clip_factor = answers
        """1 where the update is not to land; 1 where it is; what gradients are multiplied by to be clipped"""
        self._place, self._limits, self._scaled, self._elements, self._spare = place, limits, scaled, elements, spare

    def read(self) -> HostMeasurements:
        """Once: the memory serves another step then."""
        loss, norm, found, scale, *squares = self._place.read()
        self._spare.append(self._place)
        named = {"loss": loss, "norm": norm}
        if self._scaled:
            named |= {"found": found, "scale": scale}
        return reading(named, self._limits, size_of(squares, self._elements))


class FusedPacker:
    """One run's; None from `pack` where it is not for the kernel."""

    def __init__(self) -> None:
        self._spare: list[Any] = []
        self._answers = torch.empty(0)
        self._each: Sequence[Tensor] = ()
        self._samples: Any = None
        self._elements: list[list[int]] = []
        self._made: object = None
        """what the table is of"""
        self._home: torch.device | None = None

    def pack(self, sensed: DeviceMeasurements, clip: float | None = None) -> FusedMeasurements | None:
        """Send everything that is sensed to the host, come to the veto and, with `clip`, to what clipping comes to."""
        loss, norm, edges, found, scale, update, update_rms, weights, differs, extra = sensed
        if update_rms is not None or weights is not None or differs is not None or extra is not None:
            return None
        device = loss.device
        if device.type != "cuda" or (kernel := KERNEL.get(device)) is None:
            return None
        _, limits = compared_with(edges)
        scaled = None if found is None or scale is None else (found, scale)
        if limits is None or (found is None) != (scale is None) or not kernel.fits(device, loss, norm, *(scaled or ())):
            return None
        samples: Any = None
        gradients: list[Tensor] = []
        if update:
            if not self._known(update, device, kernel):
                return None
            samples, gradients = self._samples, update.gradients
        if self._answers.device != device:
            self._answers = torch.zeros(3, device=device)
            self._each = self._answers.unbind()
        place = self._spare.pop() if self._spare else kernel.Place()
        most = _most(limits[0]), _most(limits[1])
        try:
            with _HERE if torch.cuda.current_device() == device.index else torch.cuda.device(device):
                place.send(loss, norm, scaled, most, clip, gradients, samples, self._answers)
        except Exception as error:  # another variant of the kernel, that could not be built
            KERNEL.disable(error)
            return None
        elements = [] if samples is None else self._elements
        return FusedMeasurements(place, self._each, limits, scaled is not None, elements, self._spare)

    def _known(self, update: UpdateSamples, home: torch.device, kernel: Any) -> bool:
        """Whether the samples are such as the kernel reads; its table of them is made anew where they have changed."""
        if update.made is self._made and home == self._home:
            return self._samples is not None
        self._samples, self._made, self._home = None, update.made, home
        seen, gradients = [s for groups in update.groups for group in groups for s in group], update.gradients
        if (
            len(seen) > kernel.MOST_SAMPLES
            or len({g.dtype for g in gradients}) != 1
            or len({s.v.dtype for s in seen}) != 1
            or not (kernel.known(gradients[0].dtype) and kernel.known(seen[0].v.dtype))
        ):
            return False
        rows = [_row(s) for s in seen]
        for s, g, (_, step, *_rest, decay) in zip(seen, gradients, rows, strict=True):
            counted = step is None or kernel.fits(home, step)
            if not counted or math.isnan(decay) or s.v.device != home or g.device != home:
                return False
        self._samples, self._elements = kernel.Samples(rows, gradients[0].dtype), elements_of(update)
        return True


def _row(s: Seen) -> tuple[Any, ...]:
    betas, step = s.group.get("betas"), s.step
    decay = 0.0
    if betas is None or step is None:
        step = None
    elif isinstance(betas[1], Tensor) or not isinstance(step, Tensor):
        decay = math.nan  # not for the kernel
    else:
        decay = math.log2(betas[1]) if betas[1] > 0 else -math.inf
    if isinstance(s.group.get("eps"), Tensor):  # which may be written to
        decay = math.nan
    sample = s.sample
    return s.v, step, s.v.numel(), sample.shape[1], sample.strides[0], s.floor, decay


def _most(limit: float | None) -> float:
    return MOST if limit is None else min(limit, MOST)


def _load(device: torch.device) -> Any:
    from holdfast.runtime.update import measurement_kernel as sensing_kernel

    one = torch.ones((), device=device)
    place = sensing_kernel.Place()
    for clip, norm in _TRIED:  # from the second on by the way that is short
        there = torch.full((), norm, device=device)
        answers = torch.full((3,), 7.0, device=device)
        place.send(one, there, None, (MOST, 2.0), clip, (), None, answers)
        veto, lands, factor = answers.tolist()
        expected = float(clip_factor(clip, there))
        clips = factor == expected or (math.isnan(factor) and math.isnan(expected))
        if place.read()[0] != 1.0 or (veto, lands) != ((0.0, 1.0) if norm <= 2.0 else (1.0, 0.0)) or not clips:
            raise RuntimeError("it gives another answer than it should")
    return sensing_kernel


KERNEL = OptionalKernel(_load, "a step is sensed in several launches")
