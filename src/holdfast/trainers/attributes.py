"""The state of an object that has no state_dict of its own: those of its attributes that hold plain values and tensors.

Values that are as they were at the start are not saved, so that a resumed process keeps settings that its user has changed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.runtime.data.split import tensor_versions, tensors_of

_SCALARS = (type(None), bool, int, float, str)
_MAX_ITEMS = 256
"""of a longer list only the length is copied, because it would be copied at every step; a longer dict is not restored"""
_LENGTH = "length of the list"
MAX_BYTES = 1 << 20
_NOT_THE_USERS = (
    "torch", "torchmetrics", "lightning", "pytorch_lightning", "transformers", "accelerate", "trl", "datasets", "peft",
    "logging", "tqdm", "rich",
)  # fmt: skip
"""packages whose objects are restored in another way, or hold nothing of the run"""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Attributes:
    """Saves and restores the plain attributes of an object, except those in `ignored`."""

    def __init__(self, owner: Any, ignored: Iterable[str] = ()) -> None:
        self._owner, self._ignored = owner, frozenset(ignored)
        self._start, self._names = self._plain(), frozenset(vars(owner))
        self._sketch = self._other()

    def copy_state(self) -> dict[str, Any]:
        """Return copies of the attributes that are not as they were at the start."""
        start = self._start
        return {
            name: value for name, value in self._plain().items() if name not in start or not _same(value, start[name])
        }

    state_dict = copy_state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the attributes. Those that are not in `state` are as they were at the start, or did not exist."""
        saved = {**self._start, **state}
        now = vars(self._owner)
        for name in self._plain().keys() - saved.keys() - self._names:
            del now[name]
        for name, value in saved.items():
            if isinstance(value, dict) and value.keys() == {_LENGTH}:
                del now[name][value[_LENGTH] :]
            else:
                now[name] = copied(value)

    def changed(self) -> list[str]:
        """Return the attributes that are not restored and have changed since the start, each once."""
        now = self._other()
        found = [name for name, value in self._sketch.items() if name in now and now[name] != value]
        for name in found:
            del self._sketch[name]
        return found

    def _plain(self) -> dict[str, Any]:
        """Return copies of the plain values; of a long list, only its length."""
        found = {name: value for name, value in vars(self._owner).items() if name not in self._ignored}
        return {
            name: {_LENGTH: len(value)} if type(value) is list and len(value) > _MAX_ITEMS else copied(value)
            for name, value in found.items()
            if _is_plain(value) or (type(value) is list and len(value) > _MAX_ITEMS)
        }

    def _other(self) -> dict[str, Any]:
        names = vars(self._owner).items()
        found = {name: _sketch(value) for name, value in names if name not in self._ignored and not _is_plain(value)}
        return {name: sketch for name, sketch in found.items() if sketch is not None}


class States:
    """Holds the state of callbacks and metrics by name. A resumed process may have others: theirs stays as it is."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self._parts = parts
        self._large: set[str] = set()
        """those that are not copied before every step: EMA weights change only after an update that landed"""

    def copy_state(self) -> dict[str, Any]:
        """Return the states of the small ones."""
        copies: dict[str, Any] = {}
        for name, part in self._parts.items():
            if name in self._large:
                continue
            copies[name] = part.copy_state() if hasattr(part, "copy_state") else copied(part.state_dict())
            if nbytes(copies[name]) > MAX_BYTES:
                self._large.add(name)
                del copies[name]
        return copies

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all."""
        return {name: pack(part.state_dict()) for name, part in self._parts.items()}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Load the states of those it has."""
        for name in states.keys() & self._parts.keys():
            self._parts[name].load_state_dict(unpack(states[name]))


def pack(value: Any) -> Any:
    """Return a copy in which every tensor is its bits: a metric may be NaN, which is no fault of the run."""
    return _map_tensors(value, _to_bits)


def _to_bits(value: Tensor) -> dict[str, Any]:
    bits = value.detach().clone()
    return {"dtype": str(value.dtype).removeprefix("torch."), "bits": bits.view(_BITS.get(bits.itemsize, bits.dtype))}


def unpack(value: Any) -> Any:
    """Return what `pack` was given."""
    if isinstance(value, dict):
        if value.keys() == {"dtype", "bits"}:
            return value["bits"].view(getattr(torch, value["dtype"])).clone()
        return {key: unpack(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(unpack(part) for part in value)
    return value


def copied(value: Any) -> Any:
    """Return a copy of a plain value."""
    return _map_tensors(value, lambda tensor: tensor.detach().clone())


def _map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return a copy of dicts, lists and tuples with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _map_tensors(part, change) for key, part in value.items()}
    return type(value)(_map_tensors(part, change) for part in value) if isinstance(value, list | tuple) else value


def nbytes(value: Any) -> int:
    """Return the bytes of the tensors in a plain value."""
    return sum(tensor.nbytes for tensor in tensors_of(value))


def _is_plain(value: Any) -> bool:
    """Return whether a value is small, and made of numbers, text, tensors, and lists and dicts of them."""
    kind = type(value)
    if kind in _SCALARS:
        return True
    if kind is Tensor:
        return value.nbytes <= MAX_BYTES and not value.requires_grad
    if kind not in (list, tuple, dict) or len(value) > _MAX_ITEMS:
        return False
    if kind is dict:
        return all(type(key) in (str, int) for key in value) and all(map(_is_plain, value.values()))
    return all(map(_is_plain, value))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or type(one) is not type(other):  # comparing tensors would wait for the device
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _sketch(value: Any) -> Any:
    """Return something that changes when most values do, without reading all of a large one; None if it cannot be told."""
    if isinstance(value, random.Random):
        return hash(value.getstate())
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, Tensor):
        return tensor_versions(value)
    if isinstance(value, np.ndarray):
        return float(value.sum()) if value.dtype.kind in "fiu" else None
    if isinstance(value, Collection):
        return len(value)
    parts = getattr(value, "__dict__", None)
    if parts is None or callable(value) or type(value).__module__.partition(".")[0] in _NOT_THE_USERS:
        return None
    return tuple(
        (k, v if type(v) in _SCALARS else len(v)) for k, v in parts.items() if type(v) in (*_SCALARS, list, dict)
    )
