"""Every random generator a run draws from, captured and restored together."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from holdfast.runtime.state.host_rng import numpy_from_plain, numpy_to_plain, restore_numpy, try_numpy


class RngState(NamedTuple):
    """Holds the state of every generator. Its values are never modified, so two captures may share them."""

    python: tuple[Any, ...]
    numpy: Any
    torch: torch.Tensor
    devices: tuple[torch.Tensor, ...]
    generators: tuple[torch.Tensor, ...]

    def same(self, other: RngState) -> bool:
        """Return whether nothing was drawn between the two captures."""
        return (
            torch.equal(self.torch, other.torch)
            and self.python == other.python
            and _numpy_equal(self.numpy, other.numpy)
            and all(map(torch.equal, self.devices, other.devices))
            and all(map(torch.equal, self.generators, other.generators))
        )

    def plain(self) -> dict[str, Any]:
        """Return the state as plain values and tensors, for a file."""
        return {**self._asdict(), "numpy": numpy_to_plain(self.numpy)}

    @staticmethod
    def of(plain: dict[str, Any]) -> RngState:
        """Invert `plain`."""
        return RngState(**{**plain, "numpy": numpy_from_plain(plain["numpy"])})

    def try_out(self) -> None:
        """Set generators of its own to this state. Raise what a generator raises if the state is not one of its own."""
        random.Random().setstate(self.python)
        try_numpy(self.numpy)
        if not all(isinstance(state, torch.Tensor) for state in self.devices):
            raise TypeError("the random state of a CUDA device is no tensor")
        for state in (self.torch, *self.generators):
            torch.Generator().set_state(state)


class Rng:
    """The global generators of Python, NumPy and torch (CPU and the model's CUDA devices), and the user's own."""

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        self._devices = sorted({d.index or 0 for d in devices if d.type == "cuda"})
        self._generators: list[torch.Generator] = []
        self.has_user_generators = False
        if self._devices:
            torch.cuda.init()  # type: ignore[no-untyped-call]

    def include(self, generator: torch.Generator | None) -> None:
        """Capture this generator too. Ignores None and a generator that is already included."""
        if isinstance(generator, torch.Generator) and all(g is not generator for g in self._generators):
            self._generators.append(generator)
            self.has_user_generators = True

    def user_states(self) -> tuple[torch.Tensor, ...]:
        """Return the states of the included generators."""
        return tuple([g.get_state() for g in self._generators])

    def states_of(self, generators: Iterable[torch.Generator], state: RngState) -> list[torch.Tensor]:
        """Return what a captured state holds of these generators, which are included."""
        by_id = {id(g): value for g, value in zip(self._generators, state.generators, strict=False)}
        return [by_id[id(g)] for g in generators]

    def replay_user_draws(self, before: tuple[torch.Tensor, ...], after: tuple[torch.Tensor, ...]) -> None:
        """Move each included generator that is in its state `before` to its state `after`; leave the others alone."""
        for generator, old, new in zip(self._generators, before, after, strict=False):
            if torch.equal(generator.get_state(), old):
                generator.set_state(new)

    def capture(self) -> RngState:
        """Return the states of all generators. Draws nothing and does not synchronize with a device."""
        numpy = sys.modules.get("numpy")  # not imported: nothing draws from it
        return RngState(
            random.getstate(),
            None if numpy is None else numpy.random.get_state(legacy=False),
            torch.default_generator.get_state(),
            tuple([torch.cuda.default_generators[i].get_state() for i in self._devices]),
            tuple([g.get_state() for g in self._generators]),
        )

    def find_mismatch(self, state: RngState) -> str | None:
        """Return why a state is that of other generators, or None."""
        shapes = [(value.shape, value.dtype) for value in self.capture().devices]
        if shapes == [(value.shape, value.dtype) for value in state.devices]:
            return None
        return f"it holds random state of {len(state.devices)} CUDA devices, and the model is on {len(shapes)}"

    def restore(self, state: RngState) -> None:
        """Put every generator back into its captured state. SetupError if NumPy's bit generator is another one."""
        random.setstate(state.python)
        if state.numpy is not None:
            restore_numpy(state.numpy)
        torch.set_rng_state(state.torch)
        for index, value in zip(self._devices, state.devices, strict=True):
            torch.cuda.set_rng_state(value, index)
        for generator, value in zip(self._generators, state.generators, strict=False):
            generator.set_state(value)


def _numpy_equal(a: Any, b: Any) -> bool:
    """Compare two NumPy states bit by bit, for any bit generator."""
    if a is b:
        return True
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_numpy_equal(a[name], b[name]) for name in a)
    if hasattr(a, "tobytes") and hasattr(b, "tobytes"):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    return repr(a) == repr(b)
