"""Every random stream a run draws from, taken and put back as one."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from holdfast.runtime.state.host_rng import NumpyStream, PythonStream, numpy_of, numpy_plain, restore_numpy


class RngState(NamedTuple):
    """Where every stream stands. Nobody changes what it holds: two that are the same may share it."""

    python: tuple[Any, ...]
    numpy: Any
    torch: torch.Tensor
    devices: tuple[torch.Tensor, ...]
    generators: tuple[torch.Tensor, ...]

    def same(self, other: RngState) -> bool:
        """Whether nothing was drawn between the two."""
        return (
            torch.equal(self.torch, other.torch)
            and self.python == other.python
            and _alike(self.numpy, other.numpy)
            and all(map(torch.equal, self.devices, other.devices))
            and all(map(torch.equal, self.generators, other.generators))
        )

    def plain(self) -> dict[str, Any]:
        """As plain values and tensors, for a file."""
        return {**self._asdict(), "numpy": numpy_plain(self.numpy)}

    @staticmethod
    def of(plain: dict[str, Any]) -> RngState:
        """What `plain` gave."""
        return RngState(**{**plain, "numpy": numpy_of(plain["numpy"])})


class Rng:
    """The global generators of Python, NumPy and torch (CPU and the model's CUDA devices), and the loader's own."""

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        self._devices = sorted({d.index or 0 for d in devices if d.type == "cuda"})
        self._generators: list[torch.Generator] = []
        self._python, self._numpy = PythonStream(), NumpyStream()
        if self._devices:
            torch.cuda.init()  # type: ignore[no-untyped-call]

    def include(self, generator: torch.Generator | None) -> None:
        """Add a generator of the user's own; the default one is there already."""
        if isinstance(generator, torch.Generator) and all(g is not generator for g in self._generators):
            self._generators.append(generator)

    def own(self) -> tuple[torch.Tensor, ...]:
        """Where the user's own generators stand."""
        return tuple([g.get_state() for g in self._generators])

    def move_own(self, before: tuple[torch.Tensor, ...], after: tuple[torch.Tensor, ...]) -> None:
        """Draw from the user's own generators what was once drawn: those that stand at `before` go to `after`."""
        for generator, old, new in zip(self._generators, before, after, strict=False):
            if torch.equal(generator.get_state(), old):
                generator.set_state(new)

    def capture(self) -> RngState:
        """Draws nothing, and waits for no device."""
        devices = [torch.cuda.default_generators[i].get_state() for i in self._devices]
        return RngState(
            self._python.state(), self._numpy.state(), torch.default_generator.get_state(), tuple(devices), self.own()
        )

    def restore(self, state: RngState) -> None:
        random.setstate(state.python)
        if state.numpy is not None:
            restore_numpy(state.numpy)
        torch.set_rng_state(state.torch)
        for index, value in zip(self._devices, state.devices, strict=True):
            torch.cuda.set_rng_state(value, index)
        for generator, value in zip(self._generators, state.generators, strict=False):
            generator.set_state(value)


def _alike(a: Any, b: Any) -> bool:
    """Whether two states of NumPy's are the same, whatever generator they are of."""
    if a is b:
        return True
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_alike(a[name], b[name]) for name in a)
    if hasattr(a, "tobytes") and hasattr(b, "tobytes"):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    return repr(a) == repr(b)
