"""Measures a rank's own gradients before they are averaged: the norm over some small parameters.

After averaging, a rank whose gradients exploded looks like any other. Small parameters (biases, norm weights) of every depth
are measured as their gradients arrive, because whatever goes wrong flows back through the layers before it. This changes
nothing and waits for nothing. A single process measures nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from holdfast.runtime.tensors.device_span import DeviceSpan
from holdfast.runtime.tensors.sharded import is_sharded, local

_MAX_PARAMETERS, _MAX_ELEMENTS = 64, 1 << 16


class LocalGradNorms:
    """Collects the norms: call `finish_backward` after every backward, `pop` once a step."""

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        *,
        enabled: bool,
        now: Callable[[], float] = time.perf_counter,
        span: DeviceSpan | None = None,
    ) -> None:
        self._now, self.span = now, span
        self._last_at: float | None = None
        """when the step's last gradient arrived"""
        self._norms: list[Tensor] = []
        self._sum_of_squares: Tensor | None = None
        self._handles: list[Any] = []
        self._hooked = WeakTensorKeyDictionary()
        for module, name, parameter in _choose(modules) if enabled else ():
            if is_sharded(parameter):  # forward and backward use another tensor, which FSDP2 gathers
                self._handles.append(module.register_forward_pre_hook(self._before_forward(name)))
            self._hook(parameter)

    def _hook(self, parameter: Any) -> None:
        if isinstance(parameter, Tensor) and parameter.requires_grad and parameter not in self._hooked:
            handle = parameter.register_hook(self._measure)  # type: ignore[no-untyped-call]
            self._hooked[parameter] = handle
            self._handles.append(handle)

    def _before_forward(self, name: str) -> Any:
        def hook(module: nn.Module, _: Any) -> None:
            if not torch.compiler.is_compiling():
                self._hook(getattr(module, name, None))

        return hook

    @torch.no_grad()
    def _measure(self, gradient: Tensor) -> None:
        # At once: the average is written to the same memory.
        part = local(gradient)
        if not part.is_sparse:
            self._norms.append(torch.linalg.vector_norm(part, dtype=torch.float32))
            self._last_at = self._now()
            if self.span is not None:
                self.span.extend()

    @torch.no_grad()
    def finish_backward(self, counts: bool = True) -> None:
        """Add the norms of one backward to the step's sum, or drop them if the backward does not count."""
        norms, self._norms = self._norms, []
        if norms and counts:
            squares = torch.stack([n.to(norms[0].device) for n in norms]).double().square().sum()
            total = self._sum_of_squares
            self._sum_of_squares = squares if total is None else total + squares.to(total.device)

    def pop(self) -> Tensor | None:
        """Return the norm over the step, and begin the next; None if nothing was measured."""
        total, self._sum_of_squares, self._norms = self._sum_of_squares, None, []
        return None if total is None else total.sqrt()

    def pop_last_arrival(self) -> float | None:
        """Return when the step's last gradient arrived here, before the ranks averaged it; None if nothing was measured."""
        last_at, self._last_at = self._last_at, None
        return last_at

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _choose(modules: Iterable[tuple[str, nn.Module]]) -> list[tuple[nn.Module, str, Tensor]]:
    """Choose evenly spread small parameters, or the smallest if all are large."""
    candidates: dict[int, tuple[nn.Module, str, Tensor]] = {}
    for _, root in modules:
        for module in root.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad:
                    candidates.setdefault(id(parameter), (module, name, parameter))
    small = [entry for entry in candidates.values() if entry[2].numel() <= _MAX_ELEMENTS]
    if small:
        return small[:: -(-len(small) // _MAX_PARAMETERS)]
    return sorted(candidates.values(), key=lambda entry: entry[2].numel())[:1]
