"""What the gradients of a rank were before they were averaged with the others': the norm over some small parameters.

Once gradients are averaged, a rank whose own exploded looks like any other. Small parameters (biases, norms, of every
depth) are looked at as their gradients arrive: what goes wrong anywhere flows back through those before it. Nothing is
changed, nothing is waited for, and one process alone looks at nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from holdfast.runtime.tensors.sharded import is_sharded, local

_MOST, _LARGEST = 64, 1 << 16
"""parameters looked at, and elements of one, at the most"""


class LocalGradNorms:
    """`finish_backward` after every backward, `pop` once a step."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], *, enabled: bool) -> None:
        self._seen: list[Tensor] = []
        self._squares: Tensor | None = None
        self._handles: list[Any] = []
        self._hooked = WeakTensorKeyDictionary()
        for module, name, parameter in _choose(modules) if enabled else ():
            if is_sharded(parameter):  # forward and backward work with another tensor, put together for it
                self._handles.append(module.register_forward_pre_hook(self._before_forward(name)))
            self._hook(parameter)

    def _hook(self, parameter: Tensor | None) -> None:
        if parameter is not None and parameter.requires_grad and parameter not in self._hooked:
            handle = parameter.register_hook(self._saw)  # type: ignore[no-untyped-call]
            self._hooked[parameter] = handle
            self._handles.append(handle)

    def _before_forward(self, name: str) -> Any:
        def hook(module: nn.Module, _: Any) -> None:
            if not torch.compiler.is_compiling():
                self._hook(module._parameters.get(name))

        return hook

    @torch.no_grad()
    def _saw(self, gradient: Tensor) -> None:
        # Now: its memory is what the average is written to.
        own = local(gradient)
        if not own.is_sparse:
            self._seen.append(torch.linalg.vector_norm(own, dtype=torch.float32))

    def finish_backward(self, counts: bool = True) -> None:
        """A backward is done: what was seen of it, as one number; nothing, where it does not count."""
        if self._seen:
            seen, self._seen = self._seen, []
            if counts:
                self._add(seen)

    @torch.no_grad()
    def _add(self, seen: list[Tensor]) -> None:
        squares = torch.stack([n.to(seen[0].device) for n in seen]).double().square().sum()
        self._squares = squares if self._squares is None else self._squares + squares.to(self._squares.device)

    def pop(self) -> Tensor | None:
        """The norm over the step; None where nothing was seen."""
        squares, self._squares = self._squares, None
        self._seen = []
        return None if squares is None else squares.sqrt()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _choose(modules: Iterable[tuple[str, nn.Module]]) -> list[tuple[nn.Module, str, Tensor]]:
    found: list[tuple[nn.Module, str, Tensor]] = []
    seen: set[int] = set()
    for _, root in modules:
        for module in root.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.requires_grad and id(parameter) not in seen:
                    seen.add(id(parameter))
                    found.append((module, name, parameter))
    small = [entry for entry in found if entry[2].numel() <= _LARGEST]
    return small[:: -(-len(small) // _MOST)] if small else sorted(found, key=lambda entry: entry[2].numel())[:1]
