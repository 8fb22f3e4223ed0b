"""The global streams of Python and NumPy: where they stand, without asking them each time.

Asking takes 15 us of Python and 45 of NumPy, for 624 words that are nearly always the same as before. So the memory they
lie in is compared, all of it, and they are asked only where a byte of it has changed. Which memory that is, is tried out on
generators of our own first. Where it is not as expected, or somebody has put another generator in the place of the usual
one, the stream is asked every time.
"""

from __future__ import annotations

import ctypes
import functools
import random
import struct
import sys
from typing import Any, TypeAlias

import torch

from holdfast.core.base.errors import SetupError

_HEADER = object.__basicsize__
_TWISTER = 4 * 624 + 4
"""bytes of a Mersenne Twister: its words, and its place among them"""

_TYPE = "type of the array"

Memory: TypeAlias = "ctypes.Array[ctypes.c_char]"


class PythonStream:
    """What `random.getstate` gives. Nobody changes it."""

    def __init__(self) -> None:
        self._owner: Any = None
        self._memory: Memory | None = None
        self._seen: bytes | None = None
        self._left: float | None = None
        """what a pair of normal values has left over: an attribute, by which it is told from another"""
        self._state: tuple[Any, ...] = ()

    def state(self) -> tuple[Any, ...]:
        owner: Any = getattr(random.getstate, "__self__", None)
        if owner is not self._owner:
            self._owner, self._seen, self._memory = owner, None, _python_memory(owner)
        memory = self._memory
        if memory is None:
            return random.getstate()
        held, left = memory.raw, owner.gauss_next
        if held != self._seen or left is not self._left:
            self._state = random.getstate()
            # Another thread may have drawn meanwhile: then it is a state, and not that of these bytes.
            still = memory.raw == held and owner.gauss_next is left
            self._seen, self._left = held if still else None, left
        return self._state


class NumpyStream:
    """What `numpy.random.get_state(legacy=False)` gives. Nobody changes it. None before anybody has imported NumPy.

    The words are where the bit generator says they are. What a pair of normal values has left over is in the RandomState
    itself, and so is which bit generator it has.
    """

    def __init__(self) -> None:
        self._owner: Any = None
        self._bits: Any = None
        self._memory: tuple[Memory, Memory] | None = None
        self._seen: tuple[bytes, bytes] | None = None
        self._state: Any = None

    def state(self) -> Any:
        numpy = sys.modules.get("numpy")
        if numpy is None:
            return None
        get_state = numpy.random.get_state
        owner = getattr(get_state, "__self__", None)
        bits = getattr(owner, "_bit_generator", None)
        if owner is not self._owner or bits is not self._bits:
            self._owner, self._bits, self._seen = owner, bits, None
            self._memory = _numpy_memory(numpy.random, owner, bits)
        if self._memory is None:
            return get_state(legacy=False)
        words, rest = self._memory
        held = words.raw, rest.raw
        if held != self._seen:
            self._state = get_state(legacy=False)
            self._seen = held if (words.raw, rest.raw) == held else None
        return self._state


def restore_numpy(state: Any) -> None:
    """What `NumpyStream` gave, perhaps in another process. SetupError where it is another bit generator's."""
    import numpy

    try:
        numpy.random.set_state(state)
    except ValueError:
        was, now = state["bit_generator"], numpy.random.get_state(legacy=False)["bit_generator"]
        if was == now:
            raise
        raise SetupError(
            f"numpy.random drew from {was} when this was saved, and draws from {now} now: before the Guard is made, give it "
            "such a one again by numpy.random.set_bit_generator"
        ) from None


def numpy_plain(state: Any) -> Any:
    """A state of NumPy's, of whichever bit generator, as plain values and tensors: for a file. Words of 32 bits, which the
    usual one has, go by themselves, others with their type."""
    if isinstance(state, dict):
        return {name: numpy_plain(value) for name, value in state.items()}
    if not hasattr(state, "astype"):
        return state
    if not state.ndim:
        return state.item()
    kind = state.dtype.name
    values = torch.from_numpy(state.astype("int64" if state.dtype.kind in "iu" else kind))
    return values if kind == "uint32" else {_TYPE: kind, "values": values}


def numpy_of(plain: Any) -> Any:
    """What `numpy_plain` was given."""
    if isinstance(plain, torch.Tensor):
        return plain.numpy().astype("uint32")
    if not isinstance(plain, dict):
        return plain
    if _TYPE in plain:
        return plain["values"].numpy().astype(plain[_TYPE])
    return {name: numpy_of(value) for name, value in plain.items()}


def _at(address: int, size: int) -> Memory:
    return (ctypes.c_char * size).from_address(address)


def _inside(owner: Any, kind: type) -> Memory:
    """What an object has of a type made in C, less the header. Good for as long as the object is."""
    return _at(id(owner) + _HEADER, kind.__basicsize__ - _HEADER)


def _python_memory(owner: Any) -> Memory | None:
    return _inside(owner, random.Random.__bases__[0]) if type(owner) is random.Random and _python_as_known() else None


def _numpy_memory(numpy_random: Any, owner: Any, bits: Any) -> tuple[Memory, Memory] | None:
    known = type(owner) is numpy_random.RandomState and type(bits) is numpy_random.MT19937
    if not known or not _numpy_as_known(numpy_random):
        return None
    return _at(bits.ctypes.state_address, _TWISTER), _inside(owner, numpy_random.RandomState)


@functools.cache
def _python_as_known() -> bool:
    """Whether a generator's words, and its place among them, are the memory of it."""
    if sys.implementation.name != "cpython" or random.Random.__bases__[0].__basicsize__ < _HEADER + _TWISTER:
        return False
    trial = random.Random(1)
    memory = _inside(trial, random.Random.__bases__[0])
    for _ in range(3):
        *words, place = trial.getstate()[1]
        if memory.raw[:_TWISTER] != struct.pack("=i624I", place, *words):
            return False
        trial.getrandbits(32 * 300)
    return True


@functools.cache
def _numpy_as_known(numpy_random: Any) -> bool:
    """The same of NumPy's, and whether what a pair of normal values leaves over is in the RandomState."""
    if sys.implementation.name != "cpython":
        return False
    bits = numpy_random.MT19937(1)
    trial = numpy_random.RandomState(bits)
    words, rest = _at(bits.ctypes.state_address, _TWISTER), _inside(trial, numpy_random.RandomState)
    for _ in range(3):
        inner = trial.get_state(legacy=False)["state"]
        if words.raw != inner["key"].tobytes() + struct.pack("=i", inner["pos"]):
            return False
        trial.random_sample(150)
    state = trial.get_state(legacy=False)
    seen = set()
    for has, value in ((0, 0.0), (0, 0.7), (1, 0.7), (1, -0.3)):
        trial.set_state({**state, "has_gauss": has, "gauss": value})
        if struct.pack("=d", value) not in rest.raw:
            return False
        seen.add(rest.raw)
    return len(seen) == 4
