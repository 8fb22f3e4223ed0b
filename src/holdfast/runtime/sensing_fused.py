"""What `sensing` does, in one launch: for a process alone on a GPU, on all but the few steps at which more is looked at.

In a loop that waits for the host, each of the dozen launches that `sensing` takes costs 10 to 30 us. Where Triton is not
there, or a number is not of the kind that the kernel reads, `sensing` itself does it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from holdfast.runtime.kernels import Kernel
from holdfast.runtime.sensing import MOST, Known, Reading, Sensed, compared_with, reading
from holdfast.runtime.update_size import Seen, elements_of, size_of


class FusedPacked:
    """The numbers on their way to the host, and the veto, where the step ran."""

    def __init__(
        self, place: Any, veto: Tensor, limits: Known, scaled: bool, elements: list[list[int]], spare: list[Any]
    ):
        self.veto = veto
        self._place, self._limits, self._scaled, self._elements, self._spare = place, limits, scaled, elements, spare

    def read(self) -> Reading:
        """Once: the memory serves another step then."""
        loss, norm, found, scale, *squares = self._place.read()
        self._spare.append(self._place)
        named = {"loss": loss, "norm": norm}
        if self._scaled:
            named |= {"found": found, "scale": scale}
        return reading(named, self._limits, size_of(squares, self._elements))


class Fused:
    """One run's; None from `pack` where it is not for the kernel."""

    def __init__(self) -> None:
        self._spare: list[Any] = []
        self._veto: Tensor | None = None
        self._samples: Any = None
        self._places: list[Any] = []

    def pack(self, sensed: Sensed) -> FusedPacked | None:
        """Send everything that is sensed to the host, and come to the veto."""
        loss, norm, found, scale = sensed.loss, sensed.norm, sensed.found, sensed.scale
        more = (sensed.update_rms, sensed.weights, sensed.differs, sensed.extra)
        device = loss.device
        if device.type != "cuda" or any(part is not None for part in more) or (kernel := KERNEL.on(device)) is None:
            return None
        _, limits = compared_with(sensed.limits)
        scaled = None if found is None or scale is None else (found, scale)
        if limits is None or (found is None) != (scale is None) or not kernel.fits(device, loss, norm, *(scaled or ())):
            return None
        seen = [s for groups in sensed.update or () for group in groups for s in group]
        if seen and not self._known(seen, device, kernel):
            return None
        if self._veto is None or self._veto.device != device:
            self._veto = torch.zeros((), device=device)
        place = self._spare.pop() if self._spare else kernel.Place()
        most = tuple(MOST if limit is None else min(limit, MOST) for limit in limits)
        gradients = [s.g for s in seen]
        try:
            with torch.cuda.device(device):
                place.send(loss, norm, scaled, most, gradients, self._samples if seen else None, self._veto)
        except Exception as error:  # another variant of the kernel, that could not be built
            KERNEL.give_up(error)
            return None
        elements = elements_of(sensed.update or ())
        return FusedPacked(place, self._veto, limits, scaled is not None, elements, self._spare)

    def _known(self, seen: Sequence[Seen], home: torch.device, kernel: Any) -> bool:
        """Whether the samples are such as the kernel reads; its table of them is made anew where they have changed."""
        if (
            len(seen) > kernel.MOST_SAMPLES
            or len({s.g.dtype for s in seen}) != 1
            or len({s.v.dtype for s in seen}) != 1
        ):
            return False
        rows = [_row(s) for s in seen]
        samples, places = self._samples, _places(seen)
        if samples is not None and places == self._places and all(map(_same, rows, samples.rows)):
            return True
        self._samples, self._places = None, places
        if not (kernel.known(seen[0].g.dtype) and kernel.known(seen[0].v.dtype)):
            return False
        for s, (_, step, *_rest, decay) in zip(seen, rows, strict=True):
            counted = step is None or kernel.fits(home, step)
            if not counted or math.isnan(decay) or s.v.device != home or s.g.device != home:
                return False
        self._samples = kernel.Samples(rows, seen[0].g.dtype)
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
    sample = s.sample
    return s.v, step, s.v.numel(), sample.shape[1], sample.strides[0], s.floor, decay


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return is_(a[0], b[0]) and is_(a[1], b[1]) and a[2:] == b[2:]


def _places(seen: Sequence[Seen]) -> list[Any]:
    """What the same tensor may have been moved to, by `.data`."""
    steps = [s.step.data_ptr() if isinstance(s.step, Tensor) else None for s in seen]
    return [seen[0].g.dtype, *[s.v.data_ptr() for s in seen], *steps]


def _load(device: torch.device) -> Any:
    from holdfast.runtime import sensing_kernel

    one, veto = torch.ones((), device=device), torch.ones((), device=device)
    place = sensing_kernel.Place()
    place.send(one, one, None, (MOST, MOST), (), None, veto)
    if place.read()[:2] != [1.0, 1.0] or float(veto) != 0.0:
        raise RuntimeError("it gives another answer than it should")
    return sensing_kernel


KERNEL = Kernel(_load, "a step is sensed in several launches")
